"""How many messages more than a program counts are under way on a link whose messages take time.

A program (schedule/lower.py) counts the messages in flight as if they took no time. Over a real link a
message is in flight for longer. gloo begins to send when the sender has heard that the receive has started,
so a receive starts as long before the send as a message takes for the way back:

    receiver   Post x                                1F0 takes x
               |---way back--|--busy--|---latency---|
    sender                   Send x

The most messages of a link that overlap so are those that it has to hold. As many sends then go out before a
Release has to wait: a message that has arrived is known to the sender after the same way back.
"""

from __future__ import annotations

from dataclasses import replace

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.lower import Link, lower
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Timetable


def messages_ahead(timetable: Timetable, costs: Costs) -> int:
    """How many messages more than a program counts the fullest link holds; 0 for costs without links.

    It is what `zbpp.MessagesAhead` takes. Raises PlanError as `simulate` does.
    """
    if costs.links is None:
        return 0
    timeline, programs, values = simulate(timetable, costs), lower(timetable), Values.of(timetable)
    more = 0
    for sender, receiver in programs.links:
        way_back, _ = costs.links.of(receiver, sender)
        posted = [each - way_back if rank == sender else each for rank, each in enumerate(timeline.ends)]
        held = Link(replace(timeline, ends=tuple(posted)), values, sender, receiver).in_flight
        more = max(more, held - Link(programs.timeline, values, sender, receiver).in_flight)
    return more
