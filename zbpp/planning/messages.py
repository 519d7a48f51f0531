"""The messages between stages, by kind of action: the data-flow table as planners use it.

A kind is a stage and an op (`zbpp.schedule.dataflow_arrays`). In the table an action waits for at most
one value that another stage makes. The values that its own stage makes need no message: every plan
keeps F, B and W of one microbatch on one stage in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zbpp.schedule.dataflow_arrays import producers, stage_of
from zbpp.schedule.timetable import PlanError


class Messages(NamedTuple):
    """Lists by kind.

    senders: the kinds on another stage one of which sends the kind its message (B or BW, whichever the
        plan contains; B stands first); () if the kind waits for no message.
    receivers: the kinds that wait for the message of this one; () if there are none.
    latency: time of the message that the kind waits for (ms); 0 on one rank.
    """

    senders: list[tuple[int, ...]]
    receivers: list[tuple[int, ...]]
    latency: list[float]


def messages_between(num_stages: int, message: Callable[[int, int], float]) -> Messages:
    """message: the time of a message from one stage to another (ms), 0 on one rank.

    Raises PlanError if the data-flow table has an action that waits for several other stages.
    """
    senders = [_senders(kind, values) for kind, values in enumerate(producers(num_stages))]
    receivers: list[tuple[int, ...]] = [() for _ in senders]
    latency = [0.0 for _ in senders]
    for kind, sending in enumerate(senders):
        for sender in sending:
            receivers[sender] = (*receivers[sender], kind)
            latency[kind] = message(stage_of(sender), stage_of(kind))
    return Messages(senders, receivers, latency)


def _senders(kind: int, values: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Of the values that a kind consumes, the producers of the one that another stage makes."""
    remote = [kinds for kinds in values if stage_of(kinds[0]) != stage_of(kind)]
    if len(remote) > 1:
        raise PlanError(f"planners time one message per action; kind {kind} waits for {len(remote)}")
    return remote[0] if remote else ()
