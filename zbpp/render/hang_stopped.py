"""Where a rank stood whose process was stopped (SIGSTOP, Ctrl-Z), from its record and from the others'.

A rank that finds out about the stop lets the process run again, so that the job can end. The stopped rank
then runs on and writes its record at a later place. The times in its record say where it stood before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zbpp.schedule import from_csv

Record = Mapping[str, Any]  # what a flight-rank-N.json holds
_AWAITING = ("Recv ", "Release ")


def stopped_ranks(records: Mapping[int, Record]) -> dict[int, Record]:
    """The ranks whose processes were stopped when another rank failed.

    For each, its standing as that rank was told it last; `told` is when that rank saw the stop.
    """
    seen: dict[int, Record] = {}
    for record in records.values():
        when = record["standing"]["told"]
        for other in record["others"]:
            rank = other["rank"]
            if other.get("state") == "stopped" and (rank not in seen or when < seen[rank]["told"]):
                seen[rank] = {**other, "told": when}
    return dict(sorted(seen.items()))


def before_it_ran_on(record: Record, known: Record) -> Record:
    """Where a stopped rank stood when another rank saw the stop.

    record: the one that the rank wrote after it was let run. known: see `stopped_ranks`; this place is up to
    a second older than the stop.
    """
    begun = [each for each in record["last"] if float(each[3]) <= known["told"]]
    if not begun or float(begun[-1][3]) < float(known["since"]):
        return known
    number, call, instruction, since = begun[-1]
    actions = set(map(str, from_csv(record["timetable"]).rows[record["standing"]["rank"]]))
    done = [text for its_number, its_call, text, _ in begun[:-1] if (its_number, its_call) == (number, call)]
    awaits = int(instruction.rpartition(" ")[2]) if instruction.startswith(_AWAITING) else None
    return {
        **record["standing"],
        "number": number,
        "call": call,
        "step": record.get("steps", {}).get(str(number), record["standing"]["step"]),
        "position": len(done),
        "actions": sum(text in actions for text in done),
        "instruction": instruction,
        "awaits": awaits,
        "since": since,
        "told": known["told"],
        "or_after": _is_last_of_its_call(len(begun), record),  # the end of a call is not recorded
    }


def _is_last_of_its_call(number_begun: int, record: Record) -> bool:
    standing, last = record["standing"], [each[:2] for each in record["last"]]
    following = [*last, [standing["number"], standing["call"]]][number_begun]
    return bool(last[number_begun - 1] != following)


def notes(
    stopped: Iterable[int], standings: Mapping[int, Record], records: Mapping[int, Record]
) -> Iterable[str]:
    """A line for each stopped rank: where it stood, and how far it ran when it was let run."""
    for rank in stopped:
        line = f"rank {rank}: its process was stopped (SIGSTOP, Ctrl-Z) {place(standings[rank])}"
        if rank in records:
            before, later = place(standings[rank]), place(records[rank]["standing"])
            line += "; it was let run again, so that the job could end"
            line += f", and was last {later}" if later != before else ""
        yield line


def place(standing: Record) -> str:
    """`at 1F3 of step 7`, `at the end of step 7`, or `between calls, after step 7`."""
    after = f"after step {standing['step']}" if standing["step"] else "before step 1"
    if not standing["call"]:
        return f"between calls, {after}"
    call = f"step {standing['step']}" if standing["call"] == "step" else f"{standing['call']}, {after}"
    end = "the end" if standing["actions"] else "the beginning"
    later = ", or after it" if standing.get("or_after") else ""
    return f"at {standing['instruction'] or end} of {call}{later}"
