"""Which rank the others waited for when a job failed: found from the records that the ranks left.

Each record holds the last instructions of its rank with their times. So all ranks are seen at one moment:
when the first of them gave up. From that rank on, the search follows who awaited whom, up to

    a rank that awaits nobody       it is behind: it was at this place for so long
    a rank without a record         its process was killed or stopped, or has not noticed the failure
    a rank that was seen before     the ranks await each other: a message is lost

A rank whose own code raised an error ends the search at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zbpp.render.table import aligned
from zbpp.schedule import from_csv

Record = Mapping[str, Any]  # what a flight-rank-N.json holds; see zbpp/observers/flight_recorder.py

_BEFORE, _AFTER = 6, 6  # actions that are shown around the place where a rank stood
_LINES = 12  # of a stack
_WAITS = ("Recv ", "Release ")


class Standing(NamedTuple):
    """Where a rank is at a moment. since: when this began, s since the epoch.

    awaits: the process that it waits for; awaits_all: it waits for all others, at the end of a call or in a
    gather between calls. position: the number of the call's actions that are done.
    """

    call: str
    at: str
    since: float
    awaits: int | None
    awaits_all: bool
    position: int


def render_hang(records: Mapping[int, Record]) -> str:
    """Which rank is to blame; all ranks in a table; the plan around each rank's place; its stack.

    records: by the rank's number in the job. Raises KeyError or ValueError for what is no record.
    """
    failed = [each for each in records.values() if each["why"] or each["gave_up"]]
    moment = min(float(each["written"]) for each in failed or records.values())
    standings = {process: standing_at(record, moment) for process, record in sorted(records.items())}
    said, chain, is_found = blame(records, standings, moment)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    return "\n".join(
        [
            f"{when}  {said}",
            "",
            *(line.rstrip() for line in aligned(list(_table(records, standings, chain, moment)))),
            "",
            "the plan, and in brackets where each rank stood:",
            *(f"rank {process}  {_place(records[process], each)}" for process, each in standings.items()),
            *(_stack(records[chain[-1]], chain[-1]) if is_found and chain[-1] in records else ()),
        ]
    )


def blame(
    records: Mapping[int, Record], standings: Mapping[int, Standing], moment: float
) -> tuple[str, list[int], bool]:
    """(a sentence on the rank to blame, the ranks that the search followed, whether the last one is it)."""
    failed = [process for process, record in records.items() if record["why"]]
    if failed:
        first = min(failed, key=lambda process: float(records[process]["written"]))
        return f"rank {first} failed: {records[first]['why']}", [first], True
    waited = [process for process in records if records[process]["gave_up"]]
    if waited:
        here = min(waited, key=lambda process: float(records[process]["written"]))
    else:  # on NCCL the device waits, and the host runs ahead
        here = min(standings, key=lambda process: standings[process].since)
    chain = [here]
    while True:
        standing = standings.get(here)
        if standing is None:
            why = "its process was killed or stopped, or has not noticed that the job failed"
            return f"rank {here} left no record ({why}){_found_by(chain)}", chain, True
        if not standing.awaits_all and standing.awaits is None:
            seconds = moment - standing.since
            said = f"rank {here} is behind: {_where(standing)} for {seconds:.1f} s"
            return f"{said}{_found_by(chain)}", chain, True
        following = standing.awaits if standing.awaits is not None else _slowest(records, standings, chain)
        if following is None or following in chain:
            said = "no rank is behind: the ranks await each other, a message is lost"
            return f"{said}{_found_by(chain)}", chain, False
        chain.append(here := following)


def _found_by(chain: Sequence[int]) -> str:
    """`: rank 0 awaited rank 1, which awaited rank 2`."""
    if len(chain) < 2:
        return ""
    return f": rank {chain[0]} awaited " + ", which awaited ".join(f"rank {each}" for each in chain[1:])


def _slowest(
    records: Mapping[int, Record], standings: Mapping[int, Standing], seen: Sequence[int]
) -> int | None:
    """The rank that a rank waits for which awaits all others."""
    size = int(next(iter(records.values()))["num_processes"])
    missing = (process for process in range(size) if process not in standings and process not in seen)
    for process in missing:
        return process
    others = [process for process in standings if process not in seen]
    return min(
        (process for process in others if not standings[process].awaits_all),
        key=lambda process: (standings[process].awaits is not None, standings[process].since),
        default=None,
    )


def standing_at(record: Record, moment: float) -> Standing:
    """Where a rank was at a moment: some instructions later in its record, if it went on."""
    notes = [note for note in record["last"] if float(note[2]) <= moment] or record["last"][:1]
    kind, what, since = notes[-1]
    calls = [number for number, note in enumerate(notes) if note[0] == "call"]
    of_call = notes[calls[-1] :] if calls else notes
    actions = [str(action) for action in from_csv(record["timetable"]).rows[record["rank"]]]
    done = [text for name, text, _ in of_call if name == "done" and text in actions]
    awaits = what.rpartition(" ")[2] if kind == "at" and what.startswith(_WAITS) else None
    is_in_gather = kind == "outside" and record["gave_up"] and notes[-1] == record["last"][-1]
    return Standing(
        call=notes[calls[-1]][1] if calls else record["call"],
        at=what if kind == "at" else kind,
        since=float(since),
        awaits=None if awaits is None else record["processes"][int(awaits)],
        awaits_all=kind in ("call", "done") or is_in_gather,
        position=actions.index(done[-1]) + 1 if done else 0,
    )


def _where(standing: Standing) -> str:
    places = {
        "outside": f"between calls, after {standing.call}",
        "call": f"at the beginning of {standing.call}",
        "done": f"between instructions, or at the end, of {standing.call}",
    }
    return places.get(standing.at, f"at {standing.at} of {standing.call}")


def _table(
    records: Mapping[int, Record], standings: Mapping[int, Standing], chain: Sequence[int], moment: float
) -> Iterator[tuple[str, ...]]:
    yield "rank", "where", "for", "awaits", "then"
    for process in sorted({*standings, *chain}):
        if process not in standings:
            yield str(process), "no record", "-", "-", "-"
            continue
        standing, record = standings[process], records[process]
        awaited = "all" if standing.awaits_all else "-"
        yield (
            str(process),
            _where(standing),
            f"{moment - standing.since:.1f} s",
            awaited if standing.awaits is None else f"rank {standing.awaits}",
            "failed" if record["why"] else "gave up" if record["gave_up"] else "stood still",
        )


def _place(record: Record, standing: Standing) -> str:
    """`... 0F2 0F3 [Recv g(0,0) from 1] 0B0 ...`."""
    if standing.at == "outside":
        return f"[{_where(standing)}]"
    actions = [str(action) for action in from_csv(record["timetable"]).rows[record["rank"]]]
    done, here = standing.position, standing.at
    following = actions[done + 1 :] if actions[done : done + 1] == [here] else actions[done:]
    if here in ("call", "done"):
        here = "here"
    return " ".join(
        [
            *(["..."] if done > _BEFORE else []),
            *actions[max(done - _BEFORE, 0) : done],
            f"[{here}]",
            *following[:_AFTER],
            *(["..."] if len(following) > _AFTER else []),
        ]
    )


def _stack(record: Record, process: int) -> Iterable[str]:
    """The stack of the rank to blame: the end of its error's, or the beginning of faulthandler's."""
    lines = record["stack"].rstrip().splitlines()
    shown = lines[-_LINES:] if record["why"] else lines[: 3 * _LINES]
    return ["", f"rank {process} was here:", *shown]
