"""Simulates how long a step of a configured run takes with its memory switches.

The times of F, B and W are those in schedule.costs; without schedule.costs they are equal. Recompute adds the
time of F to B. Copies between device and host run beside the computation: those of activations as planned,
those of weights as zbpp/planning/weight_copies.py says. schedule.costs gives their speed: `host` is the time
of copying the tensors that F of one microbatch saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbpp.builders.plan import costs_of
from zbpp.config import TrainConfig
from zbpp.planning.recompute import with_recompute
from zbpp.planning.stage_bytes import StageBytes
from zbpp.planning.weight_copies import with_weight_copies
from zbpp.prediction.predictor import Prediction
from zbpp.schedule import Costs, simulate

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
