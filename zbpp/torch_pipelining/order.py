"""torch's order of actions as a Timetable of zbpp's.

    torch        zbpp
    F            F
    I            B, the gradient of the input
    W            W
    B            BW, the whole backward
    OVERLAP_F_B  its parts, one after the other, as torch's runtime runs them

Two differences are settled here. In zbpp the microbatches of a stage ascend in each kind of action. torch's
looped BFS runs backwards in descending order. They are numbered anew: after all F's of a stage, its backwards
may run in any order. And torch's own table for 1F1B omits actions, so GPipe and 1F1B,
which torch does not run by a table, are planned here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules as torchs

from zbpp.planning import plan
from zbpp.schedule import Action, Op, Timetable

_OPS = {
    torchs.FORWARD: Op.F,
    torchs.BACKWARD_INPUT: Op.B,
    torchs.BACKWARD_WEIGHT: Op.W,
    torchs.FULL_BACKWARD: Op.BW,
}
# Messages and reductions, which zbpp places itself. By name: torch 2.13 doesn't have all.
_BESIDE = {
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "WAIT_SEND_F",
    "WAIT_SEND_B",
    "REDUCE_GRAD",
    "WAIT_REDUCE_GRAD",
}
_OF_SHARDS = {torchs.UNSHARD, torchs.RESHARD}
_SINGLE: dict[Any, str] = {torchs.ScheduleGPipe: "gpipe", torchs.Schedule1F1B: "1f1b"}


class NoTimetable(Exception):
    """The schedule's order can't run on zbpp; the text says why."""


def timetable_of(schedule: Any) -> Timetable:
    """The order of a schedule of torch's. Raises NoTimetable."""
    if isinstance(schedule, torchs.PipelineScheduleMulti):
        rows = orders_of(schedule)
        if not rows:
            raise NoTimetable("it has no order of actions")
        sharded = {each.stage_index for each in schedule._stages if isinstance(each.submod, FSDPModule)}
        return Timetable(_ascending(_actions(rows[rank], sharded)) for rank in sorted(rows))
    if isinstance(schedule, torchs._ScheduleForwardOnly):
        return plan("gpipe", schedule._num_stages, schedule._n_microbatches)
    for kind, name in _SINGLE.items():
        if isinstance(schedule, kind):
            return plan(name, schedule._num_stages, schedule._n_microbatches)
    raise NoTimetable(f"{type(schedule).__name__} has no order of actions that zbpp knows")


def orders_of(schedule: Any) -> Mapping[int, Sequence[Any]]:
    """{rank: actions} of a schedule with several stages per rank."""
    plain: Mapping[int, Sequence[Any]] = schedule.pipeline_order
    return plain or getattr(schedule, "pipeline_order_with_comms", {})


def scales_gradients(schedule: Any) -> bool:
    """Whether torch would divide gradients by the number of microbatches.

    Its runtime does so at an action REDUCE_GRAD, which a user's own order may lack.
    """
    if not schedule.scale_grads:
        return False
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if not orders:
        return True
    actions = (each for row in orders.values() for each in row if each is not None)
    return any(each.computation_type == torchs.REDUCE_GRAD for each in actions)


def _actions(row: Iterable[Any], sharded: Container[int]) -> Iterator[Action]:
    """sharded: this rank's stages for which UNSHARD and RESHARD do something; torch writes them for all."""
    for each in row:
        if each is None or each.computation_type.name in _BESIDE:
            continue
        if each.computation_type in _OF_SHARDS and each.stage_index not in sharded:
            continue
        if each.sub_actions is not None:
            yield from _actions(each.sub_actions, sharded)
        elif each.computation_type in _OPS:
            yield Action(each.stage_index, _OPS[each.computation_type], each.microbatch_index)
        else:
            raise NoTimetable(f"its order has {each}, which zbpp leaves to the stages' own wrapper")


def _ascending(row: Iterable[Action]) -> list[Action]:
    """The actions, with the microbatches of each stage numbered in ascending order per kind of action."""
    actions = list(row)
    numbers: dict[tuple[int, Op], list[int]] = defaultdict(list)
    for each in actions:
        numbers[_kind(each)].append(each.microbatch)
    ascending = {kind: iter(sorted(found)) for kind, found in numbers.items()}
    return [Action(each.stage, each.op, next(ascending[_kind(each)])) for each in actions]


def _kind(action: Action) -> tuple[int, Op]:
    return action.stage, action.op
