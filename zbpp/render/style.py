"""What all drawings of timelines share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zbpp.planning.memory_limit import memory_text
from zbpp.schedule.costs import ACTIVATIONS
from zbpp.schedule.simulate import Timeline
from zbpp.schedule.timetable import Op, Timetable

# Dark for a rank's first stage, light for its further ones; text is white on dark, black on light.
COLOURS = {
    Op.F: ("#2c6fb3", "#a9cdf0"),
    Op.B: ("#c2570c", "#fbc592"),
    Op.W: ("#38895a", "#b4dfbf"),
    Op.BW: ("#87479b", "#dcbde8"),
}
MEANING = {Op.F: "F", Op.B: "B (input)", Op.W: "W (weights)", Op.BW: "BW (both)"}

Timelines = Mapping[str, Timeline] | Iterable[tuple[str, Timeline]]


def titled(timelines: Timelines) -> list[tuple[str, Timeline]]:
    """(title, timeline), in the order given."""
    return list(timelines.items() if isinstance(timelines, Mapping) else timelines)


def beginning(timeline: Timeline) -> float:
    """The first start of all ranks in ms: measured clocks begin anywhere, drawings at 0."""
    return float(min(start[0] for start in timeline.starts))


def place_on_rank(timetable: Timetable) -> list[int]:
    """For each stage, how many stages of its rank come before it: 1 for the second half of a V."""
    return [timetable.stages_of(rank).index(stage) for stage, rank in enumerate(timetable.rank_of)]


def peak_name(timeline: Timeline) -> str:
    """What the peaks are: `peak activations`, `peak memory`, or `process peak` where they were measured."""
    if timeline.measured:
        return "process peak"
    return "peak activations" if timeline.memory_unit == ACTIVATIONS else "peak memory"


def peak_text(timeline: Timeline, rank: int | None = None) -> str:
    """The peak of one rank, or the largest."""
    peaks = timeline.peak_memory
    return memory_text(max(peaks) if rank is None else peaks[rank], timeline.memory_unit)


def milliseconds(time: float) -> str:
    """`456.3 ms`, `12,670 ms`."""
    return f"{time:,.0f} ms" if time >= 1e3 else f"{time:.4g} ms"


def in_words(timeline: Timeline) -> str:
    """`makespan 30 ms, bubble rate 11.1 % (rank 0), peak activations 4 (rank 0)`: the largest, and whose."""
    rates = [
        timeline.idle(rank) / (timeline.span(rank) or 1.0) for rank in range(timeline.timetable.num_ranks)
    ]
    return (
        f"makespan {milliseconds(timeline.makespan)}, "
        f"bubble rate {max(rates):.1%} ({_whose(rates)}), "
        f"{peak_name(timeline)} {peak_text(timeline)} ({_whose(timeline.peak_memory)})"
    ).replace("%", " %")


def _whose(numbers: Sequence[float]) -> str:
    """The rank of the largest number."""
    most = max(numbers)
    if min(numbers) >= most - 1e-9 * abs(most):
        return "each rank" if len(numbers) > 1 else "rank 0"
    return f"rank {numbers.index(most)}"
