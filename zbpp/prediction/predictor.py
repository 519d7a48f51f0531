"""Predicts the memory of each rank of a configured training run, before the run begins.

stage_memory.py measures the bytes of each stage. zbpp.schedule.interpret.memory computes from them what each
rank holds over a step of its program (programs.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from zbpp.config import ConfigError, TrainConfig
from zbpp.prediction.measured_stages import MeasuredStages
from zbpp.prediction.programs import step_programs
from zbpp.prediction.stage_memory import FAKE, LONGEST_OF, REAL, Known, measure_stages
from zbpp.run.cut import speeds_of
from zbpp.run.plan import build_offload, costs_of, planned, slice_bounds_of
from zbpp.run.stages import pipeline_ranks
from zbpp.schedule import Costs, Op, Program, Timetable
from zbpp.schedule.interpret.memory import RankMemory
from zbpp.schedule.interpret.stage_bytes import StageBytes

__all__ = ["FAKE", "REAL", "Prediction", "Predictor", "predict"]

_GIB = 2**30
Stages = frozenset[int]


class Prediction(NamedTuple):
    """The predicted memory of a run.

    measured: the stages. ranks: each rank's step. how: whether the stages ran on fake tensors or on the CPU,
    and why on the CPU, in words. programs: each rank's program of a step. recomputed: the stages that
    recompute. costs: the times in schedule.costs, else in proportion to the stages' products.
    """

    timetable: Timetable
    measured: MeasuredStages
    ranks: list[RankMemory]
    how: str
    programs: Sequence[Program] = ()
    recomputed: Stages = frozenset()
    costs: Costs = Costs()

    @property
    def stages(self) -> list[StageBytes]:
        """The bytes of each stage."""
        return self.measured.stages


@dataclass
class Predictor:
    """Predicts runs of one model whose configs differ in schedule, recompute, reshard and the like.

    It measures stages once for all configs under which the stages are alike. Stages that can't run on fake
    tensors run on the CPU, where they take memory.
    """

    _known: dict[tuple[Any, ...], MeasuredStages] = field(default_factory=dict)
    _alike: Known = field(default_factory=Known)
    _slice_bounds: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)

    def predict(self, config: TrainConfig, timetable: Timetable | None = None) -> Prediction:
        """The predicted memory of a run. Raises ConfigError or PlanError."""
        if timetable is None:
            timetable = planned(config, pipeline_ranks(config.parallel, config.parallel.num_processes or 1))
        speeds = speeds_of(config, timetable.num_ranks)
        measured, recomputed = self.measure(config, timetable)
        asked = build_offload(config, costs_of(config.schedule, timetable))
        offload = () if asked is None else asked.plan(timetable)
        programs = step_programs(config, timetable, offload)
        ranks = measured.predicted(programs)
        costs = costs_of(config.schedule, timetable)
        if config.schedule.costs is None:
            costs = measured.costs_at([speeds[rank] for rank in timetable.rank_of])
        return Prediction(timetable, measured, ranks, _how(config, measured), programs, recomputed, costs)

    def measure(self, config: TrainConfig, timetable: Timetable) -> tuple[MeasuredStages, Stages]:
        """The bytes of each stage of the timetable's cut, and which stages recompute.

        Raises ConfigError if nothing fits with memory.recompute=auto.
        """
        if config.memory.recompute != "auto":
            is_on = config.memory.recompute != "none"
            chosen = frozenset(range(timetable.num_stages) if is_on else ())
            return self._measured(config, timetable).switched(config), chosen
        plain, recomputed = (
            self._measured(_with_recompute(config, each), timetable).switched(config)
            for each in ("none", "block")
        )
        chosen = choose_recompute(config, timetable, plain, recomputed)
        return plain.mixed(recomputed, chosen), chosen

    def _bounds(self, config: TrainConfig, timetable: Timetable) -> tuple[int, ...]:
        """The bounds of the timetable's slices; computed once for all configs of one model and cut."""
        key = str(config.schedule.slices), timetable.num_slices, timetable.num_stages, str(config.model)
        if key not in self._slice_bounds:
            self._slice_bounds[key] = slice_bounds_of(config, timetable)
        return self._slice_bounds[key]

    def _measured(self, config: TrainConfig, timetable: Timetable) -> MeasuredStages:
        sizes = timetable.num_stages, timetable.num_microbatches, config.microbatch_size
        parallel, memory = config.parallel, config.memory
        degrees = parallel.replicate, parallel.shard, parallel.context, parallel.tensor, parallel.expert
        optimizer = str(replace(config.optimizer, validation="before", clip_norm=None))
        bounds = self._bounds(config, timetable)
        key = (
            bounds,
            *sizes,
            *degrees,
            parallel.reshard,
            parallel.messages,
            str(parallel.message_boundaries),
            memory.head_at_once,
            memory.recompute,
            config.precision,
            optimizer,
            str(config.model),
            str(config.finetune),
            str(config.data),
        )
        if key not in self._known:
            self._known[key] = measure_stages(config, timetable, bounds, self._alike)
        return self._known[key]


def predict(config: TrainConfig) -> Prediction:
    """The predicted memory of a configured run. Raises ConfigError or PlanError."""
    return Predictor().predict(config)


def choose_recompute(
    config: TrainConfig, timetable: Timetable, plain: MeasuredStages, recomputed: MeasuredStages
) -> Stages:
    """The stages that recompute, so that every rank stays within memory.limit.

    A rank's memory depends on its own stages alone, so each rank chooses by itself: of the sets of its stages
    with which it fits, the one whose F's take the least time. The choice ignores memory.offload, which would
    save more. Raises ConfigError, with the least limit that works, if no choice fits.
    """
    limits = config.memory.limits(timetable.num_ranks) or [math.inf] * timetable.num_ranks
    f = costs_of(config.schedule, timetable).per_stage(timetable.num_stages).duration[Op.F]
    chosen: set[int] = set()
    least = []  # memory that each rank needs
    for rank, program in enumerate(step_programs(config, timetable)):
        peaks: dict[Stages, float] = {}
        for stages in _subsets(timetable.stages_of(rank)):
            (found,) = plain.mixed(recomputed, stages).predicted([program])
            peaks[stages] = found.peak
        least.append(min(peaks.values()))
        fitting = [stages for stages, peak in peaks.items() if peak <= limits[rank]]
        chosen |= min(fitting, key=lambda stages: sum(f[each] for each in stages), default=set())
    if any(need > limit for need, limit in zip(least, limits, strict=True)):
        raise ConfigError(
            f"memory.recompute=auto, memory.limit={as_typed(config.memory.limit)}: no choice of stages to "
            f"recompute fits; write memory.limit={limit_that_holds(least, config.memory.limit)} or more "
            "(zbpp memory says which other switches make it fit)"
        )
    return frozenset(chosen)


def as_typed(given: float | Sequence[float]) -> str:
    """A number, or a list of numbers, as one types it."""
    return f"[{','.join(f'{each:g}' for each in given)}]" if isinstance(given, Sequence) else f"{given:g}"


def limit_that_holds(peaks: Sequence[float], given: float | Sequence[float]) -> str:
    """The least memory.limit that holds these bytes of each rank: a list if the one given is a list."""
    gib = [math.ceil(each / _GIB * 1000) / 1000 for each in peaks]
    return as_typed(gib if isinstance(given, Sequence) else max(gib))


def _subsets(stages: Sequence[int]) -> Iterator[Stages]:
    for size in range(len(stages) + 1):
        yield from map(frozenset, combinations(stages, size))


def _with_recompute(config: TrainConfig, what: str) -> TrainConfig:
    return replace(config, memory=replace(config.memory, recompute=what))


def _how(config: TrainConfig, measured: MeasuredStages) -> str:
    found, left_out = config.not_predicted, config.counts_without_offload
    note = f"; stages that recompute: {left_out}" if left_out else ""
    if config.batching.is_tokens:
        note += f"; a bound: every microbatch as long as the longest of the first {LONGEST_OF} batches"
    return measured.how + note + (f"; NOT COUNTED: what {', '.join(found)} changes" if found else "")
