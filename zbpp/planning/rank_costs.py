"""Costs of a model that is not cut yet: numbers for one rank's share of it."""

from __future__ import annotations

from dataclasses import dataclass

from zbpp.schedule.costs import ACTIVATIONS, BYTES, CostNumbers, Costs, CostsInBytes, PerStage
from zbpp.schedule.timetable import PlanError, shown


@dataclass(frozen=True)
class RankCosts(CostNumbers):
    """The same names as `Costs`; a number is for one rank's share of the model, however many stages that is.

    So schedules with one stage per rank and with several run the same model, see `per_stage`. A list has one
    number per part of the model, in model order, for any number of parts that num_ranks divides.
    memory_unit: "activations" or "bytes".
    Raises PlanError as `Costs` does.
    """

    memory_unit: str = ACTIVATIONS

    def per_stage(self, num_stages: int, num_ranks: int) -> Costs:
        """The costs of `num_stages` stages on `num_ranks` ranks that together are this model.

        A number is divided evenly among a rank's stages. A list whose length is a multiple of num_ranks
        is made finer (a stage falls into equal parts) or coarser (neighbours become one stage). So two stages
        a rank take half of the share's reduction each: each has half of the gradients. A message
        takes as long as before; of neighbours that become one stage, the longest message counts. Raises
        PlanError for less than one rank.
        """
        if num_ranks < 1:
            raise PlanError(f"num_ranks={num_ranks}: write a whole number, 1 or more")
        fitted = {
            name: _fitted(value, num_stages, num_ranks, is_message=name == "comm")
            for name, value in self.numbers.items()
        }
        return (CostsInBytes if self.memory_unit == BYTES else Costs)(**fitted)


def check_rank_costs(costs: object) -> None:
    """Raises PlanError for anything else than `RankCosts`: `Costs` fit one number of stages only."""
    if not isinstance(costs, RankCosts):
        raise PlanError(
            f"costs={shown(costs)}: write RankCosts(f=..., b=..., w=...), for one rank's share of the model"
        )


def _fitted(value: PerStage, num_stages: int, num_ranks: int, is_message: bool) -> PerStage:
    if isinstance(value, int | float):
        return value if is_message else value * num_ranks / num_stages
    length = len(value)
    if not length or length % num_ranks or max(length, num_stages) % min(length, num_stages):
        return value  # Costs.per_stage says what is wrong with this list
    if length < num_stages:
        parts = num_stages // length
        return [number if is_message else number / parts for number in value for _ in range(parts)]
    size = length // num_stages
    groups = [value[start : start + size] for start in range(0, length, size)]
    return [max(group) if is_message else sum(group) for group in groups]
