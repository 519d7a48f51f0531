"""Which link between ranks a step waits for most: that at whose full speed the step would be shortest."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, Timetable


class SlowestLink(NamedTuple):
    """A link, from one rank to another, and the makespans (ms) with it as it is and at full speed.

    At full speed a link delays nothing and is never occupied. Costs.comm stays.
    """

    sender: int
    receiver: int
    makespan: float
    without: float

    @property
    def saves(self) -> float:
        """The share of the step's time that the link at full speed would save."""
        return 1 - self.without / self.makespan

    def __str__(self) -> str:
        return (
            f"The step waits most for the link {self.sender} -> {self.receiver}: it takes "
            f"{self.makespan:,.5g} ms, and {self.without:,.5g} ms with that link at full speed."
        )


def slowest_link(timetable: Timetable, costs: Costs) -> SlowestLink | None:
    """The link of costs.links at whose full speed the timetable's makespan is shortest.

    Of equal ones the first in the order of (sender, receiver). None where no single link at full speed makes
    the step shorter. Raises PlanError as `simulate` does.
    """
    if costs.links is None:
        return None
    makespan = simulate(timetable, costs).makespan
    found: list[SlowestLink] = []
    for sender, receiver in _used(timetable, costs):
        faster = replace(costs.links, pairs={**costs.links.pairs, (sender, receiver): (0.0, 0.0)})
        without = simulate(timetable, replace(costs, links=faster)).makespan
        found.append(SlowestLink(sender, receiver, makespan, without))
    best = min(found, key=lambda each: each.without, default=None)
    return best if best is not None and best.without < makespan else None


def _used(timetable: Timetable, costs: Costs) -> list[tuple[int, int]]:
    """The links over which messages take time."""
    routes = costs.of_units(timetable).routes
    return sorted(
        {
            (timetable.rank_of[number // len(Op)], route.receiver)
            for number, route in enumerate(routes)
            if route is not None and route.latency + route.busy > 0
        }
    )
