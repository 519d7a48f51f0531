"""Ways to cut a model into stages, as text, with the load of the heaviest rank and stage of each."""

from __future__ import annotations

from collections.abc import Sequence

from zbpp.partition import loads, partition
from zbpp.planning.memory_limit import quantity
from zbpp.planning.placement import PLACEMENTS, place_stages
from zbpp.render.table import aligned
from zbpp.schedule.timetable import PlanError

_REMARK = (
    "Loads are divided by the mean load. 'default' depends on the number of stages alone; the trainer uses\n"
    "it, unless model.layers_per_stage=[...] says otherwise."
)


def render_cuts(layers: Sequence[float], num_ranks: int, *, first: float = 0.0, last: float = 0.0) -> str:
    """For each placement three cuts: the default, the best for this placement, and equal numbers of layers.

    Raises PlanError if there are too few layers for one stage per rank.
    """
    try:
        partition(layers, num_ranks, first=first, last=last)
    except ValueError as error:
        raise PlanError(str(error)) from None
    rows = [("placement", "stages", "cut", "heaviest rank", "heaviest stage")]
    ends = ["layers per stage"]
    for placement in PLACEMENTS:
        rank_of = place_stages(num_ranks, placement)
        for name, counts in _cuts(layers, rank_of, first, last).items():
            stages = loads(counts, layers, first=first, last=last)
            rows.append((placement, str(len(stages)), name, *_heaviest(stages, rank_of)))
            ends.append(" ".join(map(str, counts)))
    table = [f"{line}  {end}" for line, end in zip(aligned(rows), ends, strict=True)]
    return "\n".join([_total(layers, first, last), "", *table, "", _REMARK])


def _cuts(layers: Sequence[float], rank_of: Sequence[int], first: float, last: float) -> dict[str, list[int]]:
    """The cuts by name; none if there are too few layers.

    A cut whose heaviest rank and stage are as heavy as the default's is left out.
    """
    num_stages = len(rank_of)
    quotient, remainder = divmod(len(layers), num_stages)
    try:
        cuts = {
            "default": partition(layers, num_stages, first=first, last=last),
            "own": partition(layers, num_stages, first=first, last=last, rank_of=rank_of),
            "equal counts": [quotient + (stage < remainder) for stage in range(num_stages)],
        }
    except ValueError:
        return {}
    stages = {name: loads(cut, layers, first=first, last=last) for name, cut in cuts.items()}
    default = _heaviest(stages["default"], rank_of)
    return {
        name: cut
        for name, cut in cuts.items()
        if name == "default" or _heaviest(stages[name], rank_of) != default
    }


def _heaviest(stages: Sequence[float], rank_of: Sequence[int]) -> tuple[str, str]:
    """The loads of the heaviest rank and of the heaviest stage, each divided by the mean load."""
    ranks = [0.0] * (max(rank_of) + 1)
    for load, rank in zip(stages, rank_of, strict=True):
        ranks[rank] += load
    whole = sum(stages) or 1.0
    return f"{max(ranks) * len(ranks) / whole:.2f}", f"{max(stages) * len(stages) / whole:.2f}"


def _total(layers: Sequence[float], first: float, last: float) -> str:
    mean = quantity(sum(layers) / len(layers))
    beside = f"before them {quantity(first)}, after them {quantity(last)}"
    return f"{len(layers)} layers of {mean} on average; {beside}"
