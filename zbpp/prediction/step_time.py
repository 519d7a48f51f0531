"""Simulates how long a step of a configured run takes with its memory switches.

The times of F, B and W are those in schedule.costs; without schedule.costs they are equal. Recompute adds the
time of F to B. Copies between device and host run beside the computation: those of activations as planned,
those of weights as below. schedule.costs gives their speed: `host` is the time
of copying the tensors that F of one microbatch saves.

With offloaded weights, a stage of n equal blocks computes block by block; while a block runs, the next
block's weights are copied. If the copy of all the stage's weights takes c ms, F takes the following time, and
B likewise:

    c/n   +   (n-1)/n max(F, c)   +   F/n
    the first block's copy        the last block's computation

W copies the gradients to the device and back: 2 c in which nothing else runs. So fewer, larger microbatches
copy less for the same work. The times are upper bounds: the first block of an action may still be on the
device from the action before, and the first W of a step finds no gradients to copy to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbpp.config import TrainConfig
from zbpp.planning.recompute import with_recompute
from zbpp.planning.stage_bytes import StageBytes
from zbpp.prediction.predictor import Prediction
from zbpp.run.plan import costs_of
from zbpp.schedule import Costs, simulate
from zbpp.schedule.costs import PerStage
from zbpp.schedule.timetable import Op

_MANY = 6  # consecutive steps


def step_ms(config: TrainConfig, prediction: Prediction) -> tuple[float, str]:
    """(the time of a step in ms, a note on what the time leaves out)."""
    timetable = prediction.timetable
    costs, note = _costs(config, prediction)
    offload = prediction.offload
    if config.optimizer.validation == "after":
        many = (simulate(timetable, costs, offload, num_steps=num).makespan for num in (_MANY, _MANY // 2))
        longer, shorter = many
        return (longer - shorter) / (_MANY - _MANY // 2), note
    return simulate(timetable, costs, offload).makespan, note


def _costs(config: TrainConfig, prediction: Prediction) -> tuple[Costs, str]:
    num_stages = prediction.timetable.num_stages
    costs = costs_of(config.schedule, prediction.timetable)
    if prediction.recomputed:
        costs = with_recompute(costs, prediction.recomputed, num_stages)
    if not config.memory.offload_weights:
        return costs, ""
    if not costs.has_host:
        return costs, "copies counted as free: schedule.costs has no `host`"
    return _with_copies_of_weights(costs, prediction.stages), ""


def _with_copies_of_weights(costs: Costs, stages: Sequence[StageBytes]) -> Costs:
    """The costs with the copies of offloaded weights, at the speed of `host`."""
    num_stages = len(stages)
    host = costs.per_stage(num_stages).host
    copies = [time / max(1.0, each.saved) * each.on_host for time, each in zip(host, stages, strict=True)]
    num_blocks = max(1, min(each.num_blocks for each in stages))
    return with_weight_copies(costs, copies, num_stages=num_stages, num_blocks=num_blocks)


def with_weight_copies(costs: Costs, weight_copy: PerStage, *, num_stages: int, num_blocks: int) -> Costs:
    """The costs of stages whose weights are offloaded, with two buffers on the device.

    costs: without offloaded weights. weight_copy: ms of copying a stage's weights one way.
    """
    given = costs.per_stage(num_stages)
    copies = replace(Costs(), host=weight_copy).per_stage(num_stages).host

    def passed(op: Op) -> list[float]:
        return [
            _pass_ms(time, copy, num_blocks) for time, copy in zip(given.duration[op], copies, strict=True)
        ]

    b, w = passed(Op.B), [w + 2 * copy for w, copy in zip(given.duration[Op.W], copies, strict=True)]
    extra = [
        bw - own_b - own_w
        for bw, own_b, own_w in zip(*(given.duration[op] for op in (Op.BW, Op.B, Op.W)), strict=True)
    ]
    bw = [sum(each) for each in zip(b, w, extra, strict=True)]
    return replace(costs, f=passed(Op.F), b=b, w=w, bw=[max(0.0, each) for each in bw])


def _pass_ms(time: float, copy: float, num_blocks: int) -> float:
    """The time of F or B of one stage, with the copy of its weights."""
    return (copy + (num_blocks - 1) * max(time, copy) + time) / num_blocks
