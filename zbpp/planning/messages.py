"""The values that pass from stage to stage, by kind of action: the data-flow table as planners use it.

A kind is a stage and an op as one number (`zbpp.schedule.dataflow_arrays`). In the table an action waits for
at most one value that another stage makes; here this value is called its message. If both stages are on the
same rank nothing is sent, and the latency is 0. The values that an action's own stage makes need no wait:
every plan runs the F, B and W of a microbatch on a stage in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zbpp.schedule.dataflow_arrays import op_of, producers, stage_of
from zbpp.schedule.timetable import Op, PlanError


class Messages(NamedTuple):
    """Lists by kind.

    senders[kind]: the kinds that may make the message of `kind`: F alone, or first B and then BW, of which a
        plan contains one; () if the kind waits for no message.
    receivers[kind]: the kinds whose message `kind` may make; () if there are none.
    latency[kind]: how long the message of `kind` takes (ms); 0 if both stages are on the same rank.
    """

    senders: list[tuple[int, ...]]
    receivers: list[tuple[int, ...]]
    latency: list[float]


def messages_between(num_stages: int, message: Callable[[int, int], float]) -> Messages:
    """message: the time of a message from one stage to another (ms), 0 if both are on the same rank.

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
    """The producers of the value that a kind receives from another stage; none if it receives nothing."""
    remote = [kinds for kinds in values if stage_of(kinds[0]) != stage_of(kind)]
    if len(remote) > 1:
        action = f"{Op(op_of(kind))} on stage {stage_of(kind)}"
        raise PlanError(f"planners time one message per action; {action} waits for {len(remote)}")
    return remote[0] if remote else ()
