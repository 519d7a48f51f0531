"""What all drawings of timelines share: colours, the words for ops and figures, the order of panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zbpp.planning.memory_limit import memory_text
from zbpp.schedule.costs import ACTIVATIONS, Costs
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Op, Timetable

# For each op (dark, light): dark for a rank's first stage, light for its later ones.
COLOURS = {
    Op.F: ("#2c6fb3", "#a9cdf0"),
    Op.B: ("#c2570c", "#fbc592"),
    Op.W: ("#38895a", "#b4dfbf"),
    Op.BW: ("#87479b", "#dcbde8"),
}
MEANING = {Op.F: "forward", Op.B: "input gradient", Op.W: "weight gradient", Op.BW: "whole backward"}

REDUCTION_COLOURS = ("#3f4451", "#9aa1b0")  # (dark, light), as for an op
COPY_COLOURS = {True: "#8c5a9e", False: "#c9a3d6"}  # out of the device, back
COPY_MEANING = {True: "copy out of device memory", False: "copy back"}
REDUCTION_MEANING = "sum of gradients over replicas"
EXCHANGE_COLOUR = "#d62839"
EXCHANGE_MEANING = "exposed exchange"

MESSAGE_COLOURS = {"x": COLOURS[Op.F], "g": COLOURS[Op.B]}  # (occupies its link, is on its way)
MESSAGE_MEANING = {
    "x": "activations on a link: sent, on their way",
    "g": "gradients on a link: sent, on their way",
}

Timelines = Mapping[str, Timeline] | Iterable[tuple[str, Timeline]]


def panels_of(timelines: Timelines) -> list[tuple[str, Timeline]]:
    """The panels of a drawing: (title, timeline), in the order given."""
    return list(timelines.items() if isinstance(timelines, Mapping) else timelines)


def costs_by_title(
    timelines: Timelines, costs: Costs | Mapping[str, Costs] | None
) -> Mapping[str, Costs | None]:
    """The costs of each panel: one for all, or one for each title."""
    if isinstance(costs, Mapping):
        return {title: costs.get(title) for title, _ in panels_of(timelines)}
    return dict.fromkeys((title for title, _ in panels_of(timelines)), costs)


def first_start(timeline: Timeline) -> float:
    """The earliest start of any rank, in ms. Drawings begin there: a measured clock may show any time."""
    return float(min(start[0] for start in timeline.starts))


def index_on_rank(timetable: Timetable) -> list[int]:
    """For each stage its place among the stages of its rank: 0 for the first, 1 for the second."""
    return [timetable.stages_of(rank).index(stage) for stage, rank in enumerate(timetable.rank_of)]


def peak_name(timeline: Timeline) -> str:
    """The name of the peaks: `peak activations`, or `peak memory` if they are in bytes."""
    return "peak activations" if timeline.memory_unit == ACTIVATIONS else "peak memory"


def peak_text(timeline: Timeline, rank: int | None = None) -> str:
    """The peak of one rank; by default the largest of all ranks. Empty for a measured timeline.

    A measured timeline has the peaks of whole processes, which can't be compared with a plan's.
    """
    if timeline.measured:
        return ""
    peaks = timeline.peak_memory
    return memory_text(max(peaks) if rank is None else peaks[rank], timeline.memory_unit)


def milliseconds(time: float) -> str:
    """`456.3 ms`, `12,670 ms`."""
    return f"{time:,.0f} ms" if time >= 1e3 else f"{time:.4g} ms"


def tail_text(timeline: Timeline) -> str:
    """` (3 ms of reductions at its end)`; empty if the last action ends the step."""
    return f" ({milliseconds(timeline.tail)} of reductions at its end)" if timeline.tail > 0 else ""


def headline(timeline: Timeline) -> str:
    """The largest figures of a timeline, each with the rank that has it.

    `makespan 30 ms, largest bubble rate 11.1 % (rank 0), peak activations 4 (rank 0)`; with a makespan that
    ends with reductions: `makespan 33 ms (3 ms of reductions at its end), ...`
    """
    rates = [
        timeline.idle(rank) / (timeline.span(rank) or 1.0) for rank in range(timeline.timetable.num_ranks)
    ]
    figures = [
        f"makespan {milliseconds(timeline.makespan)}{tail_text(timeline)}",
        f"largest bubble rate {100 * max(rates):.1f} % ({_whose(rates)})",
    ]
    if exposed := timeline.exposed_exchange:
        figures.append(f"{EXCHANGE_MEANING} {milliseconds(max(exposed))} ({_whose(exposed)})")
    if peak := peak_text(timeline):
        figures.append(f"{peak_name(timeline)} {peak} ({_whose(timeline.peak_memory)})")
    return ", ".join(figures)


def _whose(numbers: Sequence[float]) -> str:
    """The rank that has the largest number, or `all ranks`."""
    most = max(numbers)
    if min(numbers) >= most - 1e-9 * abs(most) and len(numbers) > 1:
        return "all ranks"
    return f"rank {numbers.index(most)}"
