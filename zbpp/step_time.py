"""Simulates how long a step of a configured run takes with its memory switches.

The times of F, B and W are those in schedule.costs; without schedule.costs they are equal. Recompute adds the
time of F to B. Copies between device and host run beside the computation: those of activations as planned,
those of weights in each F and B of a stage, and those of gradients, out and back, in each W. schedule.costs
gives their speed: `host` is the time of copying the tensors that F of one microbatch saves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from zbpp.config import TrainConfig
from zbpp.planning.recompute import with_recompute
from zbpp.planning.stage_bytes import StageBytes
from zbpp.predict_memory import Prediction, costs_of
from zbpp.schedule import Costs, Op, simulate

_MANY = 6  # consecutive steps


def step_ms(config: TrainConfig, prediction: Prediction) -> tuple[float, str]:
    """(the time of a step in ms, a note on what the time leaves out)."""
    timetable = prediction.timetable
    costs, note = _costs(config, prediction)
    offload = prediction.offload
    if offload and not _has_host(costs):
        note = "copies counted as free: schedule.costs has no `host`"
        offload = ()  # free copies make no action late
    if config.optimizer.validation == "after":
        many = (simulate(timetable, costs, offload, num_steps=num).makespan for num in (_MANY, _MANY // 2))
        longer, shorter = many
        return (longer - shorter) / (_MANY - _MANY // 2), note
    return simulate(timetable, costs, offload).makespan, note


def _costs(config: TrainConfig, prediction: Prediction) -> tuple[Costs, str]:
    num_stages = prediction.timetable.num_stages
    costs = costs_of(config, prediction.timetable)
    if prediction.recomputed:
        costs = with_recompute(costs, prediction.recomputed, num_stages)
    if not config.memory.offload_weights:
        return costs, ""
    if not _has_host(costs):
        return costs, "copies counted as free: schedule.costs has no `host`"
    return with_copies_of_weights(costs, prediction.stages), ""


def with_copies_of_weights(costs: Costs, stages: Sequence[StageBytes]) -> Costs:
    """The costs with each action at least as long as the copies of weights and gradients beside it."""
    times = costs.per_stage(len(stages))
    speeds = [host / max(1.0, each.saved) for host, each in zip(times.host, stages, strict=True)]
    copies = [speed * each.on_host for speed, each in zip(speeds, stages, strict=True)]
    whole = [max(time, 3 * copy) for time, copy in zip(times.duration[Op.BW], copies, strict=True)]
    longest = {
        name: [max(time, share * copy) for time, copy in zip(times.duration[op], copies, strict=True)]
        for name, op, share in (("f", Op.F, 1), ("b", Op.B, 1), ("w", Op.W, 2))
    }
    return replace(costs, **longest, bw=whole)


def _has_host(costs: Costs) -> bool:
    given = costs.host
    return any(given) if isinstance(given, Collection) else bool(given)
