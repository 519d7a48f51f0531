"""Where each rank stood on the plan when a call failed: from the records that the ranks left."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping

from zbpp.render.hang_stopped import Record, before_it_ran_on, notes, stopped_ranks
from zbpp.render.table import aligned
from zbpp.schedule import from_csv

_BEFORE, _AFTER = 6, 6  # actions that are shown around the place where a rank stood
_CALLS = 3  # of the Python stack, the innermost ones
_TORCH = "/site-packages/torch/"  # in a call's line: the call is in torch's code, not in the user's


def render_hang(records: Mapping[int, Record]) -> str:
    """When it was, and who failed; all ranks in a table; the plan around each rank's place; stacks.

    The stacks are of the ranks that failed, and of those that awaited nobody.
    records: by rank. A rank that left no record is shown as the others knew it last. Raises KeyError or
    ValueError for what is no record.
    """
    standings, stopped = _standings(records), stopped_ranks(records)
    end = max(float(each["told"]) for each in standings.values())
    for rank in stopped.keys() & records.keys():
        standings[rank] = before_it_ran_on(records[rank], stopped[rank])
    head = ("rank", "call", "at", "for", "awaits", "told")
    rows = [head, *(_row(each, end, has_record=rank in records) for rank, each in standings.items())]
    rows_of_plan = from_csv(next(iter(records.values()))["timetable"]).rows
    return "\n".join(
        [
            _headline(records, end),
            *notes(stopped, standings, records),
            "",
            *(line.rstrip() for line in aligned(rows)),
            "",
            "the plan, and in brackets where each rank stood:",
            *(
                f"rank {rank}  {_place([str(action) for action in rows_of_plan[rank]], standing)}"
                for rank, standing in standings.items()
            ),
            *_stacks(records, standings, stopped),
        ]
    )


def _standings(records: Mapping[int, Record]) -> dict[int, Record]:
    """Each rank's standing: the one in its own record, else the last one that another rank was told."""
    known: dict[int, Record] = {}
    for record in records.values():
        for other in record["others"]:
            before = known.get(other["rank"])
            if before is None or other["told"] > before["told"]:
                known[other["rank"]] = other
    known |= {rank: record["standing"] for rank, record in records.items()}
    return dict(sorted(known.items()))


def _headline(records: Mapping[int, Record], end: float) -> str:
    """When it was, and which ranks failed by themselves."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end))
    why = [f"rank {rank} failed: {each['why']}" for rank, each in records.items() if each.get("why")]
    said = [each["said"] for each in records.values() if each.get("said")]
    return f"{when}  {'; '.join(why) or next(iter(said), 'ranks waited in vain')}"


def _row(standing: Record, end: float, *, has_record: bool) -> tuple[str, ...]:
    """end: when the last word of any rank was told. has_record: whether the rank itself left a record."""
    silent = end - standing["told"]
    return (
        str(standing["rank"]),
        _call(standing),
        standing["instruction"] or "-",
        f"{standing['told'] - standing['since']:.1f} s",
        "-" if standing["awaits"] is None else f"rank {standing['awaits']}",
        "at the end" if has_record and silent < 1 else f"{silent:.1f} s before",
    )


def _call(standing: Record) -> str:
    """`step 7`, `evaluate after step 7`, or `after step 7`."""
    after = f"after step {standing['step']}" if standing["step"] else "before step 1"
    if standing["call"] == "step":
        return f"step {standing['step']}"
    return f"{standing['call']} {after}" if standing["call"] else after


def _place(actions: list[str], standing: Record) -> str:
    """`... 0F2 0F3 [Recv g(0,0) from 1] 0B0 ...`."""
    if not standing["call"]:
        return f"[outside, {_call(standing)}]"
    done = standing["actions"]
    here = standing["instruction"] or ("its end" if done else "its beginning")
    following = actions[done + 1 :] if actions[done : done + 1] == [here] else actions[done:]
    before, after = actions[max(done - _BEFORE, 0) : done], following[:_AFTER]
    return " ".join(
        [
            *(["..."] if done > _BEFORE else []),
            *before,
            f"[{here}]",
            *after,
            *(["..."] if len(following) > _AFTER else []),
        ]
    )


def _stacks(
    records: Mapping[int, Record], standings: Mapping[int, Record], stopped: Container[int]
) -> Iterable[str]:
    for rank, record in records.items():
        if record.get("why"):
            yield from ("", f"rank {rank} failed here:")
        elif rank in stopped and record["stack"]:
            yield from ("", f"rank {rank}, once it was let run, came here:")
        elif standings[rank]["awaits"] is None and record["stack"]:
            yield from ("", f"rank {rank}, which awaited no other rank, was here:")
        else:
            continue
        stack = [each for each in record["stack"] if _TORCH not in each]
        yield "".join((stack or record["stack"])[-_CALLS:]).rstrip()
