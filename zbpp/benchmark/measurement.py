"""Measure the costs of a model's stages on this machine: times, links, copies to the host, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbpp.autograd.offload.host_copier import Copier, Copy, Moves
from zbpp.benchmark.interleaved_timing import ZbppRunner, close_all, start, time_in_turns
from zbpp.benchmark.workload import Workload
from zbpp.devices import synchronize
from zbpp.job.agreement import gather
from zbpp.measure import measured_costs
from zbpp.measure.link_times import message_bytes, timed_links, with_links
from zbpp.measure.microbatch_memory import (
    StageMemory,
    first_inputs,
    memory_per_stage,
    static_per_stage,
)
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.schedule import Action, Costs, Op, Timetable
from zbpp.schedule.costs import ACTIVATIONS


class Measurement(NamedTuple):
    """costs: times in ms, memory in bytes, a list with one number per stage each."""

    costs: Costs
    held: list[StageMemory]

    @property
    def deferred_share(self) -> float:
        """The bytes that wait for W, as a share of the bytes that wait for B."""
        return sum(each.deferred for each in self.held) / (sum(each.saved for each in self.held) or 1)

    @property
    def in_activations(self) -> Costs:
        """The costs with memory in activations: what a mean stage keeps of a microbatch from F until B.

        Weights don't count: a limit in activations is for microbatches.
        """
        unit = sum(each.saved for each in self.held) / len(self.held) or 1
        return replace(
            self.costs,
            saved=[each.saved / unit for each in self.held],
            deferred=[each.deferred / unit for each in self.held],
            static=0.0,
            memory_unit=ACTIVATIONS,
        )


def measure(workload: Workload, timetable: Timetable, num_steps: int) -> Measurement:
    """Medians over `num_steps` steps with split backwards, and as many with whole ones. Collective.

    Both are run, whether `timetable` itself has B and W or BW.
    """
    runs = [start(name, workload, form) for name, form in both_forms(timetable).items()]
    time_in_turns(runs, workload, num_steps)
    close_all(runs)
    held, (x, g) = _held(workload, timetable)
    times = measured_costs(*(timeline for run in runs for timeline in run.timelines))
    costs = times.in_bytes(
        saved=[each.saved for each in held],
        deferred=[each.deferred for each in held],
        static=static_per_stage(workload.stages(timetable), timetable.num_stages),
    )
    sizes = [each.saved or each.deferred for each in held]
    costs = replace(costs, host=host_ms(timetable, sizes, workload.here.device))
    links = timed_links(timetable, (x, g), workload.here.device, workload.timeout)
    return Measurement(with_links(costs, links, x, g), held)


def both_forms(timetable: Timetable) -> dict[str, Timetable]:
    """The same order with split backwards, and with whole ones."""
    return {"split": with_split_backward(timetable), "whole": with_whole_backward(timetable)}


def with_whole_backward(timetable: Timetable) -> Timetable:
    """The same order with every backward in one piece, at the place of its B."""
    return Timetable(
        [Action(a.stage, Op.BW if a.op == Op.B else a.op, a.microbatch) for a in row if a.op != Op.W]
        for row in timetable.rows
    )


def with_split_backward(timetable: Timetable) -> Timetable:
    """The same order with every backward in two pieces: B and at once its W, at the place of BW."""
    return Timetable([piece for action in row for piece in _pieces(action)] for row in timetable.rows)


def _pieces(action: Action) -> list[Action]:
    ops = (Op.B, Op.W) if action.op == Op.BW else (action.op,)
    return [action._replace(op=op) for op in ops]


def _held(workload: Workload, timetable: Timetable) -> tuple[list[StageMemory], tuple[int, int]]:
    """The memory that a microbatch holds on each stage, and the bytes of messages.

    One more step records each stage's inputs.
    """
    stages = workload.stages(timetable)
    args, target = workload.batch(timetable, 0)
    with first_inputs(stages) as inputs:
        runner = ZbppRunner(workload, timetable)
        runner.step(args, target)
        runner.close()
    workload.drop_gradients(timetable)
    held = memory_per_stage(
        stages,
        inputs,
        timetable.num_stages,
        workload.here.device,
        loss_fn=workload.model.loss,
        target=None if target is None else into_microbatches("target", target, workload.num_microbatches)[0],
    )
    return held, message_bytes(inputs)


# ----------------------------------------------------------------
# How long copies to host memory and back take, with nothing else running.

_PIECE = 8 * 2**20  # bytes; what F saves is in many tensors, and a copy moves one after the other
_ROUNDS = 5


def host_ms(timetable: Timetable, nbytes: Sequence[int], device: torch.device) -> list[float]:
    """Costs.host: for each stage, the time of copying `nbytes[stage]` in the slower direction. Collective.

    All ranks copy at the same time, since they do so in training, and may share the host's memory bus.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = {stage: nbytes[stage] for stage in timetable.stages_of(rank)}
    if dist.is_initialized():
        dist.barrier()
    found: dict[int, float] = {}
    for each in gather(_times(mine, device)):
        found |= each
    return [found[stage] for stage in range(timetable.num_stages)]


def _times(nbytes: Mapping[int, int], device: torch.device) -> dict[int, float]:
    copier = Copier(device)
    try:
        return {stage: _slower_ms(copier, size) for stage, size in nbytes.items()}
    finally:
        copier.close()


def _slower_ms(copier: Copier, nbytes: int) -> float:
    """The median time of a copy of `nbytes`, out or back, whichever takes longer."""
    sizes = [min(_PIECE, nbytes - start) for start in range(0, nbytes, _PIECE)]
    pairs: Moves = []
    for size in sizes:
        storage = copier.new_storage(size)
        torch.empty(0, dtype=torch.uint8, device=copier.device).set_(
            storage
        ).zero_()  # so that the system has mapped the pages before a copy is timed
        pairs.append((storage, copier.host_memory(size)))
    return max(
        median(_ms(copier, start, pairs) for _ in range(_ROUNDS)) for start in (copier.out, copier.back)
    )


def _ms(copier: Copier, start: Callable[[Moves], Copy], pairs: Moves) -> float:
    synchronize(copier.device)
    begin = time.perf_counter()
    start([*pairs]).wait()
    synchronize(copier.device)
    return (time.perf_counter() - begin) * 1e3
