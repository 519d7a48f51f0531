"""`plan`: the one entry to every schedule.

The function behind a name is called with num_ranks, num_microbatches and those of plan's options that it
declares as keyword-only parameters. `plan` then checks the timetable against placement, stages_per_rank,
memory_limit and the lengths of the costs' lists, whether the function knows these options or not. The options
of a search (objective, search, time_limit, seed, progress) have no effect on a schedule that does not search.
Where costs.reduce is not 0, `plan` orders the last W's of any schedule so that reductions end early.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from zbpp.families import FAMILIES
from zbpp.planning.complete_stages_early import complete_stages_early
from zbpp.planning.exact import optimal
from zbpp.planning.memory_limit import MemoryLimit, check_fits, limits_per_rank
from zbpp.planning.objective import MAKESPAN, OBJECTIVES
from zbpp.planning.placement import PLACEMENTS, has_placement, place_stages, placement_name
from zbpp.planning.search import zb_1p, zb_2p, zb_auto
from zbpp.planning.size_limit import BYTES_PER_ACTION, BYTES_PER_SEARCHED_ACTION, check_size, is_count
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable, shown

SCHEDULES: dict[str, Callable[..., Timetable]] = {
    **FAMILIES,
    "zb_1p": zb_1p,
    "zb_2p": zb_2p,
    "zb_auto": zb_auto,
    "optimal": optimal,
}

# Names in torch.distributed.pipelining that `_letters` does not map to ours.
_NAMES_IN_TORCH = {"ZBVZeroBubble": "zb_v", "InterleavedZeroBubble": "interleaved_zb"}


def plan(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs = Costs(),
    memory_limit: MemoryLimit = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
    objective: str = MAKESPAN,
    search: bool = True,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Callable[[float, float, float], None] | None = None,
) -> Timetable:
    """The timetable of a schedule in `SCHEDULES`, whose name may be spelled as `canonical_name` allows.

    memory_limit: in the unit of costs.saved, one number for all ranks, or a list with one per rank;
    None: no limit.
    placement ("one" | "looped" | "v"), stages_per_rank: None for the schedule's own (zb_auto, optimal: one).

    For zb_auto and optimal, which search:
    objective: "makespan", or "span", the longest of the ranks' spans. search: see zb_auto.
    time_limit: in s; the search begins with the families' plans, and makes these even if the time is over.
    seed: the same seed gives the same timetable, unless the time ran out.
    progress(share of time_limit that is spent, best objective so far in ms, lower bound in ms) is called
    about ten times a second, and at the end with a share of 1. An exception in it ends the search.

    Raises PlanError for an unknown name, an argument out of range (infinity and NaN among them), more
    actions than can be planned in about 8 GiB, lists of another length than there are stages or ranks, a
    placement or stages_per_rank that the schedule doesn't have, a number of microbatches that it can't run,
    and a memory limit that is too low (the message says what is needed, per rank).
    """
    name = canonical_name(name)
    options = {
        "costs": costs,
        "memory_limit": memory_limit,
        "placement": placement,
        "stages_per_rank": stages_per_rank,
        "objective": objective,
        "search": search,
        "time_limit": time_limit,
        "seed": seed,
        "progress": progress,
    }
    for option, value in options.items():
        check_range(option, value)
    bytes_per_action = BYTES_PER_SEARCHED_ACTION if takes_costs(name) else BYTES_PER_ACTION
    check_size(num_ranks, num_microbatches, stages_per_rank or 1, bytes_per_action)
    if placement is not None and stages_per_rank is not None:
        place_stages(num_ranks, placement, stages_per_rank)  # refuses a contradiction, whatever the schedule
    limits = limits_per_rank(memory_limit, num_ranks)

    declared = inspect.signature(SCHEDULES[name]).parameters
    given = {key: value for key, value in options.items() if key in declared and value is not None}
    timetable = SCHEDULES[name](num_ranks, num_microbatches, **given)
    _check_placement(name, timetable, placement, stages_per_rank)
    timetable = complete_stages_early(timetable, costs)  # refuses lists of another length
    if memory_limit is not None:
        check_fits(name, simulate(timetable, costs).peak_memory, limits, costs.memory_unit)
    return timetable


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


def placement_of(timetable: Timetable) -> str:
    """ "one" stage per rank, "looped" (stage s on rank s mod p), "v" (down and back up), or "other"."""
    return placement_name(timetable.rank_of)


def _is_real(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return 0 <= float(value) < math.inf  # NaN is not
    except OverflowError:  # an int too large for a float
        return False


def _is_limit(value: object) -> bool:
    each = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return all(map(_is_real, each))


# argument -> (what it must be, what to write)
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "costs": (lambda value: isinstance(value, Costs), "write Costs(f=..., b=..., w=...)"),
    "memory_limit": (
        lambda value: value is None or _is_limit(value),
        "write a number, 0 or more, in the unit of costs.saved, or one per rank; None: no limit",
    ),
    "placement": (lambda value: value in (None, *PLACEMENTS), f"write {' or '.join(PLACEMENTS)}"),
    "stages_per_rank": (
        lambda value: value is None or is_count(value),
        "write a whole number, 1 or more",
    ),
    "objective": (lambda value: value in OBJECTIVES, f"write {' or '.join(OBJECTIVES)}"),
    "search": (lambda value: isinstance(value, bool), "write True or False"),
    "time_limit": (_is_real, "write seconds, 0 or more"),
    "seed": (lambda value: isinstance(value, int) and not isinstance(value, bool), "write a whole number"),
    "progress": (lambda value: value is None or callable(value), "write a function, or None"),
}


def check_range(name: str, value: object) -> None:
    """Raises PlanError, with what to write, if an argument of `plan` is out of its range."""
    in_range, advice = _RANGES[name]
    if not in_range(value):
        raise PlanError(f"{name}={value!r}: {advice}")


def _check_placement(
    name: str, timetable: Timetable, placement: str | None, stages_per_rank: int | None
) -> None:
    own, per_rank = placement_of(timetable), timetable.num_stages // timetable.num_ranks
    if placement is not None and not has_placement(timetable.rank_of, placement):
        raise PlanError(f"{name} places its stages as {own!r}, not {placement!r}: leave placement out")
    if stages_per_rank is not None and stages_per_rank != per_rank:
        raise PlanError(
            f"{name} has {per_rank} stage(s) per rank, not {stages_per_rank}: leave stages_per_rank out"
        )
