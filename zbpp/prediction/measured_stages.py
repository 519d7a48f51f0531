"""The measured bytes of a run's stages, and their bytes under the run's memory switches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from zbpp.config import TrainConfig
from zbpp.measure.products import Products
from zbpp.schedule import Costs, Op, Program
from zbpp.schedule.interpret.memory import RankMemory, program_memory
from zbpp.schedule.interpret.stage_bytes import StageBytes, released, validated_later, weights_on_host
from zbpp.training.optim.precision import PRECISIONS


class WeightBytes(NamedTuple):
    """The bytes of a stage's weights: of all weights, of the largest block's, and of the trained ones.

    trained: the weights that the optimizer updates itself; 0 with float32 masters, which it updates instead.
    changes_gradients: whether the optimizer's step may change gradients.
    """

    all: float
    block: float
    trained: float
    changes_gradients: bool = False


class MeasuredStages(NamedTuple):
    """The measured stages of a run.

    products: of each stage. batch: the bytes of the inputs and of the target. how: whether the stages ran on
    fake tensors or on the CPU, and why on the CPU, in words.
    """

    stages: list[StageBytes]
    weights: list[WeightBytes]
    products: list[Products]
    batch: tuple[int, int]
    how: str

    def costs_at(self, speeds: Sequence[float] | None = None) -> Costs:
        """Times in proportion to the stages' products, or equal ones for stages without products.

        speeds: of each stage's rank; a rank of speed 2 takes half the time. None: all alike.
        """
        whole, speeds = sum(each.f for each in self.products), speeds or [1.0] * len(self.products)
        f, b, w = (
            [
                (getattr(each, op) / whole if whole else 1.0) / speed
                for each, speed in zip(self.products, speeds, strict=True)
            ]
            for op in ("f", "b", "w")
        )
        return Costs(f=f, b=b, w=w)

    def mixed(self, other: MeasuredStages, chosen: Collection[int]) -> MeasuredStages:
        """These measurements, with the `chosen` stages taken from `other`."""
        pairs = enumerate(zip(self.stages, other.stages, strict=True))
        return self._replace(stages=[theirs if stage in chosen else own for stage, (own, theirs) in pairs])

    def switched(self, config: TrainConfig) -> MeasuredStages:
        """The stages under the config's switches for weights, gradients and updates."""
        pairs = zip(self.stages, self.weights, strict=True)
        return self._replace(stages=[_switched(each, weights, config) for each, weights in pairs])

    def predicted(self, programs: Iterable[Program]) -> list[RankMemory]:
        """What each of these ranks holds over a step of its program."""
        return [program_memory(program, self.stages, *self.batch) for program in programs]


def with_recompute(costs: Costs, stages: Collection[int], num_stages: int) -> Costs:
    """The costs when these stages recompute: the time of F is added to their B and BW."""
    times = costs.per_stage(num_stages).duration
    f = [time if stage in stages else 0.0 for stage, time in enumerate(times[Op.F])]
    b, bw = ([time + more for time, more in zip(times[op], f, strict=True)] for op in (Op.B, Op.BW))
    return replace(costs, b=b, bw=bw)


def _switched(stage: StageBytes, weights: WeightBytes, config: TrainConfig) -> StageBytes:
    if config.memory.offload_weights:
        stage = weights_on_host(stage, parameters=weights.all, block=weights.block)
    if config.memory.gradient_release != "off":
        parallel = config.parallel
        is_shared = parallel.shard * parallel.replicate * parallel.context > 1
        stage = released(stage, is_shared=is_shared)
    if config.optimizer.validation == "after":
        copies_gradients = weights.changes_gradients or PRECISIONS[config.precision].is_scaled
        stage = validated_later(stage, trained=weights.trained, copies_gradients=copies_gradients)
    return stage
