"""When each message occupies its link, and when it is on its way: what pictures and traces show of links."""

from __future__ import annotations

from typing import NamedTuple

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow import Value
from zbpp.schedule.dataflow_arrays import Values, kinds_of
from zbpp.schedule.timeline import Timeline


class Transmission(NamedTuple):
    """A message on its link. Times in ms.

    From the end of the action that makes it until start it waits for the link; until gone it occupies the
    link; then it is on its way until it has arrived.
    """

    value: Value
    start: float
    gone: float
    arrived: float


def transmissions(timeline: Timeline, costs: Costs | None) -> dict[tuple[int, int], list[Transmission]]:
    """{(sender, receiver): its messages in their order} of the links on which messages take time.

    costs: those that the timeline was simulated with. {} without links, and for a measured timeline, which
    does not know what a message waited for.
    """
    if costs is None or costs.links is None or not timeline.delays:
        return {}
    found: dict[tuple[int, int], list[Transmission]] = {}
    routes, values = costs.of_units(timeline.timetable).routes, Values.of(timeline.timetable)
    free: dict[tuple[int, int], float] = {}
    for rank, row in enumerate(timeline.timetable.rows):
        kinds, (positions, numbers) = kinds_of(row).tolist(), values.produced_in(row)
        ends, delays = timeline.ends[rank].tolist(), timeline.delays[rank].tolist()
        receivers = [timeline.timetable.rank_of[stage] for stage in values.stages(numbers).tolist()]
        for at, value, receiver in zip(positions.tolist(), values.named(numbers), receivers, strict=True):
            length = timeline.lengths[value.microbatch] if timeline.lengths else 1.0
            route = routes[kinds[at]]
            if receiver == rank or route is None or route.latency + route.busy == 0 or length == 0:
                continue
            start = max(ends[at], free.get((rank, route.queue), 0.0))
            free[rank, route.queue] = gone = start + route.busy * length
            message = Transmission(value, start, gone, ends[at] + delays[at])
            found.setdefault((rank, receiver), []).append(message)
    return dict(sorted(found.items()))
