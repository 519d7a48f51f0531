"""A cut for ranks of unequal speed, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zbpp.planning import ChosenCut


def render_cut(
    found: ChosenCut,
    title: str,
    speeds: Sequence[float],
    better: tuple[Sequence[int], ChosenCut] | None = None,
) -> str:
    """What was chosen, how long a step takes with it, and whether the ranks have a better order.

    title: the cut as one types it. better: another order of the ranks, and the cut for it.
    """
    per_rank = found.timetable.num_stages // found.timetable.num_ranks
    placement = (
        "one stage per rank" if per_rank == 1 else f"{per_rank} stages per rank, placement {found.placement}"
    )
    even = "doesn't fit" if math.isinf(found.even) else f"{found.even / found.ideal:.2f}"
    lines = [
        f"cut for ranks of speed {_list(speeds)}: {title} ({placement})",
        f"step / ideal: {found.makespan / found.ideal:.2f}; even cut: {even}; no timetable of this cut and "
        f"placement below {found.bound / found.ideal:.2f}. Ideal: no rank is ever idle.",
    ]
    if better is not None:
        order, cut = better
        own = _list([speeds[rank] for rank in order])
        lines.append(
            f"another order of the ranks is better: {_list(order)}, of speeds {own}: "
            f"{cut.makespan / cut.ideal:.2f}"
        )
    return "\n".join(lines)


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in numbers)
