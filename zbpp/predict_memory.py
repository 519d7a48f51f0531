"""What each rank of a configured training run will hold: predicted before anything runs.

The bytes of each stage are measured (stage_memory.py), what happens to them over a step is computed
(zbpp.planning.memory_budget).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zbpp.builders.model import build_model
from zbpp.builders.parallel import pipeline_ranks
from zbpp.builders.plan import build_timetable, check_layers
from zbpp.config import TrainConfig
from zbpp.planning.costs_file import read_costs
from zbpp.planning.memory_budget import RankMemory
from zbpp.planning.rank_costs import RankCosts
from zbpp.planning.stage_bytes import StageBytes
from zbpp.schedule import Costs, Timetable, choose_offload, simulate
from zbpp.schedule.offload import RankOffload
from zbpp.stage_memory import FAKE, REAL, MeasuredStages, measure_stages

__all__ = ["FAKE", "REAL", "Prediction", "Predictor", "costs_of", "predict"]

_FREE = 1e-6  # ms, of a copy whose time nobody has measured
_GIB = 2**30


class Prediction(NamedTuple):
    """stages: the bytes of each. ranks: their step. how: what the stages ran on, and why if really.

    offload: of each rank, what leaves the device and comes back; () for nothing. recomputed: the stages that
    recompute; None: as configured.
    """

    timetable: Timetable
    stages: list[StageBytes]
    ranks: list[RankMemory]
    how: str
    offload: tuple[RankOffload, ...] = ()
    recomputed: frozenset[int] | None = None


@dataclass
class Predictor:
    """Predicts for configs of one model that differ in schedule, recompute, reshard and the like.

    Stages that were measured once are not measured again.
    """

    _known: dict[tuple[Any, ...], MeasuredStages] = field(default_factory=dict)

    def predict(
        self,
        config: TrainConfig,
        timetable: Timetable | None = None,
        recomputed: frozenset[int] | None = None,
    ) -> Prediction:
        """The memory of each rank of a step. recomputed: the stages that recompute; None: as configured.

        Raises ConfigError or PlanError.
        """
        parallel = config.parallel
        num_ranks = pipeline_ranks(parallel, parallel.num_processes or 1)
        if timetable is None:
            check_layers(build_model(config.model, config.seed), config.schedule, num_ranks)
            timetable = build_timetable(config.schedule, num_ranks, config.num_microbatches)
        measured = self.measure(config, timetable, recomputed)
        offload = _planned_offload(config, timetable, measured.stages)
        is_later = config.optimizer.validation == "after"
        ranks = measured.predicted(timetable, offload, is_validated_later=is_later)
        return Prediction(timetable, measured.stages, ranks, _how(config, measured), offload, recomputed)

    def measure(
        self, config: TrainConfig, timetable: Timetable, recomputed: frozenset[int] | None = None
    ) -> MeasuredStages:
        """The bytes of each stage of the timetable's cut."""
        sizes = timetable.num_stages, timetable.num_microbatches, config.microbatch_size
        parallel, memory = config.parallel, config.memory
        mesh = parallel.shard, parallel.tensor, parallel.reshard
        accumulates = memory.gradient_release == "accumulate"
        optimizer = str(replace(config.optimizer, validation="before", clip_norm=None))
        key = *sizes, *mesh, accumulates, memory.recompute, recomputed, config.precision, optimizer
        if key not in self._known:
            self._known[key] = measure_stages(config, timetable, recomputed)
        return self._known[key].switched(config)


def predict(config: TrainConfig) -> Prediction:
    """The memory of each rank of a configured run."""
    return Predictor().predict(config)


def costs_of(config: TrainConfig, timetable: Timetable) -> Costs:
    """The times in schedule.costs, or else F, B and W of equal length."""
    given = config.schedule.costs
    whole = RankCosts() if given is None else read_costs(given)[0]
    return whole.per_stage(timetable.num_stages, timetable.num_ranks)


def _planned_offload(
    config: TrainConfig, timetable: Timetable, stages: Sequence[StageBytes]
) -> tuple[RankOffload, ...]:
    """What leaves, as the run plans it; copies of unmeasured time take none."""
    if config.memory.offload == "none":
        return ()
    gib = config.memory.offload
    costs = costs_of(config, timetable)
    host = costs.per_stage(timetable.num_stages).host
    host = [time or _FREE if each.leaves else 0.0 for time, each in zip(host, stages, strict=True)]
    numbers = {**costs.numbers, "host": host}
    in_bytes = type(costs)(**numbers).in_bytes(
        [each.leaves for each in stages], [each.deferred_leaves for each in stages]
    )
    limit = math.inf if gib == "auto" else float(gib) * _GIB
    return choose_offload(simulate(timetable, in_bytes), in_bytes, limit, late=gib != "auto")


def _how(config: TrainConfig, measured: MeasuredStages) -> str:
    found = config.not_predicted
    return measured.how + (f"; NOT COUNTED: what {', '.join(found)} changes" if found else "")
