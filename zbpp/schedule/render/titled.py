"""What all drawings of timelines share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def quantity(number: float) -> str:
    """At most four digits, with k, M, G, T for large numbers: memory may be bytes or units."""
    if abs(number) < 1e4:
        return f"{number:.4g}"
    for power, letter in ((12, "T"), (9, "G"), (6, "M")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.4g} {letter}"
    return f"{number / 1e3:.4g} k"


def milliseconds(time: float) -> str:
    """`456.3 ms`, `12,670 ms`."""
    return f"{time:,.0f} ms" if time >= 1e3 else f"{time:.4g} ms"


def in_words(timeline: Timeline) -> str:
    """`makespan 30 ms, bubble rate 11.1 %, peak memory 4`: the largest over ranks."""
    return (
        f"makespan {milliseconds(timeline.makespan)}, bubble rate {timeline.bubble_rate:.1%}, "
        f"peak memory {quantity(max(timeline.peak_memory))}"
    ).replace("%", " %")
