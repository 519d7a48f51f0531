"""What all runners of a benchmark work on: one model, one batch after another, one set of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from zbpp.data import Data
from zbpp.devices import synchronize
from zbpp.job.world import World
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel
from zbpp.training.batches import batch_for


@dataclass(kw_only=True)
class Workload:
    """One rank's view of the work.

    prepare(stage): moves a fresh stage to its device and dtype. Runners with the same cut share their stages,
    so that their weights lie at the same place in memory.
    """

    model: PipelineModel
    data: Data
    here: World
    num_microbatches: int
    prepare: Callable[[nn.Module], nn.Module] = lambda stage: stage
    seed: int = 0
    timeout: float = 600.0
    _built: dict[tuple[int, int], nn.Module] = field(default_factory=dict)

    @property
    def is_emulated(self) -> bool:
        """Whether the stages sleep instead of computing: they hold next to nothing."""
        return getattr(self.model, "emulated", False)

    def stages(self, timetable: Timetable) -> dict[int, nn.Module]:
        """This rank's stages. Raises ValueError if the model can't be cut into so many."""
        return {
            index: self._stage(index, timetable.num_stages) for index in timetable.stages_of(self.here.rank)
        }

    def batch(self, timetable: Timetable, number: int) -> tuple[tuple[Any, ...], Any]:
        """(args, target) as this rank passes them to a step."""
        stages = self.stages(timetable)
        return batch_for(stages, timetable.num_stages, self.data.train, number, self.here.device)

    def drop_gradients(self, timetable: Timetable) -> None:
        """Set the gradients to None that a step has made."""
        for stage in self.stages(timetable).values():
            stage.zero_grad(set_to_none=True)

    def _stage(self, index: int, num_stages: int) -> nn.Module:
        if (index, num_stages) not in self._built:
            self._built[index, num_stages] = self.prepare(self.model.build_stage(index, num_stages))
        return self._built[index, num_stages]

    def parameter_bytes(self, timetable: Timetable) -> int:
        """Bytes of the parameters and buffers of this rank's stages."""
        stages = self.stages(timetable).values()
        tensors: list[Any] = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
        return sum(tensor.nbytes for tensor in tensors)

    def barrier(self) -> None:
        """Wait for all ranks; they leave at nearly the same time."""
        if self.here.size > 1:
            dist.barrier()

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        synchronize(self.here.device)
