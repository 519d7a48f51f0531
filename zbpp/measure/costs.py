"""Costs of measured steps, which a planner can use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from zbpp.schedule import Costs, Links, Op, Timeline, consumes, produces

_WAITED = 0.25  # of a message's time: a receiver that is idle for so long has waited for it


def measured_costs(*timelines: Timeline) -> Costs:
    """Per-stage median durations and message times of measured steps with the same stages, as Costs in ms.

    Their timetables may differ. An op that none of them has is filled in: BW as B + W; B and W as half of BW
    each. A message's time is the delay from the end of its producer to the start of a consumer that was idle
    and waited for it. A stage without such a message gets the median of all stages. reduce is the median
    duration of a stage's reduction, without the time for which it waited behind another one; 0 without any.
    host is the median time of copying what a stage's F saves, of the slower direction; 0 without copies.
    exchange is the median time for which F's, and B's or BW's, wait for exchanges of experts, of what waits
    less; 0 without any. It is too small where W's run meanwhile (zbpp.OverlapExchange).
    The costs are those of a microbatch: with slices, of as many slices as a microbatch has.
    """
    durations: dict[tuple[int, Op], list[float]] = defaultdict(list)
    delays: dict[int, list[float]] = defaultdict(list)
    reduced: dict[int, list[float]] = defaultdict(list)
    exchanges: dict[tuple[int, bool], list[float]] = defaultdict(list)
    copied: dict[int, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        _collect_durations(timeline, durations)
        _collect_exchanges(timeline, exchanges)
        for each in timeline.reductions:
            reduced[each.stage].append(each.end - each.start)
        for stage, _, delay, idle in _delays(timeline):
            if idle >= delay:
                delays[stage].append(delay)
        for copy in timeline.copies:
            if copy.value.name == "saved":
                copied[copy.value.stage][copy.is_out].append(copy.end - copy.start)

    def of(op: Op, stage: int) -> float | None:
        found = durations.get((stage, op))
        return median(found) if found else None

    stages = range(timelines[0].timetable.num_stages)
    bw = [of(Op.BW, stage) for stage in stages]
    b = [_first(of(Op.B, stage), _half(bw[stage])) for stage in stages]
    w = [_first(of(Op.W, stage), _half(bw[stage])) for stage in stages]
    usual = median([delay for found in delays.values() for delay in found] or [0.0])
    num_slices = timelines[0].timetable.num_slices
    of_unit = Costs(
        f=[of(Op.F, stage) or 0.0 for stage in stages],
        b=b,
        w=w,
        bw=[_first(bw[stage], b[stage] + w[stage]) for stage in stages],
        comm=[max(0.0, median(delays.get(stage, [usual]))) for stage in stages],
        reduce=[median(reduced.get(stage, [0.0])) for stage in stages] if reduced else 0.0,
        host=[max(map(median, copied[stage].values()), default=0.0) for stage in stages] if copied else 0.0,
        exchange=[min(median(exchanges[stage, is_f] or [0.0]) for is_f in (True, False)) for stage in stages]
        if exchanges
        else 0.0,
    )
    return of_unit if num_slices == 1 else of_unit.at(num_slices, num_slices)


def measured_links(*timelines: Timeline) -> Links:
    """The links of measured steps: for each pair of ranks the median of what its messages took (ms).

    It is a latency: how long a message occupied the link isn't told apart. These links replace the comm of
    `measured_costs`, which counts only messages that were sent while their receiver was idle: where a link is
    slow most are sent earlier. Here the receiver has been idle for a quarter of the message's time. A pair
    for whose messages nobody waited takes nothing.
    """
    delays: dict[tuple[int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for _, pair, delay, idle in _delays(timeline):
            if idle >= _WAITED * delay:
                delays[pair].append(delay)
    return Links(pairs={pair: (max(0.0, median(found)), 0.0) for pair, found in delays.items()})


def _half(value: float | None) -> float | None:
    return None if value is None else value / 2


def _first(*values: float | None) -> float:
    """The first value that is known, 0 without any."""
    return next((value for value in values if value is not None), 0.0)


def _collect_durations(timeline: Timeline, into: dict[tuple[int, Op], list[float]]) -> None:
    for row, starts, ends in zip(timeline.timetable.rows, timeline.starts, timeline.ends, strict=True):
        for action, duration in zip(row, (ends - starts).tolist(), strict=True):
            into[action.stage, action.op].append(duration)


def _collect_exchanges(timeline: Timeline, into: dict[tuple[int, bool], list[float]]) -> None:
    """By stage, and by whether the action is an F."""
    if not timeline.exposed:
        return
    for row, exposed in zip(timeline.timetable.rows, timeline.exposed, strict=True):
        for action, waited in zip(row, exposed.tolist(), strict=True):
            if action.op != Op.W:
                into[action.stage, action.op == Op.F].append(waited)


def _delays(timeline: Timeline) -> Iterator[tuple[int, tuple[int, int], float, float]]:
    """Yield (stage, (sender, receiver), delay, idle) for each message.

    delay: from the end of the producer to the start of the consumer. idle: how long the receiver had run
    nothing before that.
    """
    timetable = timeline.timetable
    made: dict[object, tuple[int, int, float]] = {}  # value -> rank, stage and end of its producer
    for rank, row in enumerate(timetable.rows):
        for action, end in zip(row, timeline.ends[rank].tolist(), strict=True):
            made |= dict.fromkeys(produces(action, timetable.num_stages), (rank, action.stage, end))
    for rank, row in enumerate(timetable.rows):
        idle_since = 0.0
        for action, start, end in zip(
            row, timeline.starts[rank].tolist(), timeline.ends[rank].tolist(), strict=True
        ):
            for value in consumes(action):
                sender, stage, sent = made[value]
                if sender != rank:
                    yield stage, (sender, rank), start - sent, start - idle_since
            idle_since = end
