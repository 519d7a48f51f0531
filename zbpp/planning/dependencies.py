"""What actions wait for, by kind: the data-flow table as planners use it.

A kind is a stage and an op as one number (`zbpp.schedule.dataflow_arrays`). In the table an action waits for
at most one value that another stage makes; here this value is called its message. If both stages are on the
same rank nothing is sent, and the latency is 0. The values that an action's own stage makes need no wait:
every plan runs the F, B and W of a microbatch on a stage in this order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from zbpp.schedule.dataflow_arrays import op_of, producers, stage_of
from zbpp.schedule.timetable import Op, PlanError


class Messages(NamedTuple):
    """Lists by kind.

    senders[kind]: the kinds that may make the message of `kind`: F alone, or first B and then BW, of which a
        plan contains one; () if the kind waits for no message.
    receivers[kind]: the kinds whose message `kind` may make; () if there are none.
    fixed[kind]: how long the message of `kind` takes (ms), whatever its length, unless its unit is empty;
        per_length[kind]: how much longer at length 1. 0 if both stages are on the same rank.
    """

    senders: list[tuple[int, ...]]
    receivers: list[tuple[int, ...]]
    fixed: list[float]
    per_length: list[float]

    def latency(self, kind: int, length: float) -> float:
        """How long the message of `kind` takes for a unit of this length (ms); an empty one sends none."""
        return self.fixed[kind] + self.per_length[kind] * length if length else 0.0


def messages_between(num_stages: int, terms: Callable[[int, int], tuple[float, float]]) -> Messages:
    """terms(source stage, target stage): `fixed` and `per_length` of a message (ms).

    Raises PlanError if the data-flow table has an action that waits for several other stages.
    """
    senders = [_senders(kind, values) for kind, values in enumerate(producers(num_stages))]
    receivers: list[tuple[int, ...]] = [() for _ in senders]
    fixed, per_length = [0.0 for _ in senders], [0.0 for _ in senders]
    for kind, sending in enumerate(senders):
        for sender in sending:
            receivers[sender] = (*receivers[sender], kind)
            fixed[kind], per_length[kind] = terms(stage_of(sender), stage_of(kind))
    return Messages(senders, receivers, fixed, per_length)


def _senders(kind: int, values: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The producers of the value that a kind receives from another stage; none if it receives nothing."""
    remote = [kinds for kinds in values if stage_of(kinds[0]) != stage_of(kind)]
    if len(remote) > 1:
        action = f"{Op(op_of(kind))} on stage {stage_of(kind)}"
        raise PlanError(f"planners time one message per action; {action} waits for {len(remote)}")
    return remote[0] if remote else ()


def dependency_order(num_stages: int) -> list[int]:
    """All kinds, each after the kinds that it waits for."""
    waits_for = {kind: itertools.chain(*values) for kind, values in enumerate(producers(num_stages))}
    return list(TopologicalSorter(waits_for).static_order())


def earliest_starts(
    num_stages: int, duration: Sequence[float], message: Callable[[int, int], float]
) -> list[float]:
    """For each kind, the earliest time (ms) at which it can start: the length of the longest path to it.

    duration: of each kind (ms). message(source stage, target stage): the time (ms) of a message between them.
    B and BW make the same values. The faster of the two counts, so that no plan can start a kind earlier.
    """
    needed = producers(num_stages)
    starts = [0.0] * len(needed)

    def arrival(made_by: tuple[int, ...], kind: int) -> float:
        return min(
            starts[source] + duration[source] + message(stage_of(source), stage_of(kind))
            for source in made_by
        )

    for kind in dependency_order(num_stages):
        starts[kind] = max((arrival(made_by, kind) for made_by in needed[kind]), default=0.0)
    return starts
