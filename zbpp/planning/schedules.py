"""The schedules by name: their generators, and the spellings of their names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from zbpp.families import FAMILIES
from zbpp.planning.search import zb_1p, zb_2p, zb_auto
from zbpp.schedule.timetable import PlanError, Timetable, shown

SCHEDULES: dict[str, Callable[..., Timetable]] = {
    **FAMILIES,
    "zb_1p": zb_1p,
    "zb_2p": zb_2p,
    "zb_auto": zb_auto,
}

# Names in torch.distributed.pipelining that `_letters` does not map to ours.
_NAMES_IN_TORCH = {"ZBVZeroBubble": "zb_v", "InterleavedZeroBubble": "interleaved_zb"}


def canonical_name(name: str) -> str:
    """The name in `SCHEDULES` that is meant, in any case and in torch's spelling.

    `1F1B`, `ZB-H1`, `zbh1`, `ZBVZeroBubble`, `ScheduleInterleaved1F1B`: case, punctuation and torch's
    "Schedule" make no difference. Raises PlanError with what may be meant.
    """
    spellings = {_letters(known): known for known in SCHEDULES}
    spellings |= {_letters(theirs): ours for theirs, ours in _NAMES_IN_TORCH.items()}
    wanted = _letters(name) if isinstance(name, str) else ""
    if wanted not in spellings:
        close = difflib.get_close_matches(wanted, spellings, n=1)
        hint = f"; did you mean {spellings[close[0]]}?" if close else ""
        raise PlanError(f"unknown schedule {shown(name)}; known: {', '.join(SCHEDULES)}{hint}")
    return spellings[wanted]


def takes_costs(name: str) -> bool:
    """Whether the schedule's plan depends on the costs, but for the order of last W's that reduce decides."""
    return "costs" in inspect.signature(SCHEDULES[canonical_name(name)]).parameters


def _letters(name: str) -> str:
    """Letters and digits alone, in lower case, without torch's "Schedule" before them."""
    return "".join(filter(str.isalnum, name.lower())).removeprefix("schedule")
