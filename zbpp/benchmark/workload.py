"""What everybody in a benchmark works on: one model, one batch after another, one set of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbpp.runtime.world import World
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel
from zbpp.training.batch import batch_for
from zbpp.training.data import Data


@dataclass(kw_only=True)
class Workload:
    """One rank's view of it.

    prepare(stage): moves a fresh stage to its device and type. Contestants with the same cut share
    their stages, so that nobody's weights lie elsewhere in memory.
    """

    model: PipelineModel
    data: Data
    here: World
    num_microbatches: int
    prepare: Callable[[nn.Module], nn.Module] = lambda stage: stage
    seed: int = 0
    timeout: float = 600.0
    _built: dict[tuple[int, int], nn.Module] = field(default_factory=dict)

    def stages(self, timetable: Timetable) -> dict[int, nn.Module]:
        """This rank's. Raises ValueError if the model can't be cut into that many."""
        return {
            index: self._stage(index, timetable.num_stages) for index in timetable.stages_of(self.here.rank)
        }

    def batch(self, timetable: Timetable, number: int) -> tuple[tuple[Any, ...], Any]:
        """(args, target) as this rank passes them to a step."""
        stages = self.stages(timetable)
        return batch_for(stages, timetable.num_stages, self.data.train, number, self.here.device)

    def drop_gradients(self, timetable: Timetable) -> None:
        """Those that a step has made."""
        for stage in self.stages(timetable).values():
            stage.zero_grad(set_to_none=True)

    def _stage(self, index: int, num_stages: int) -> nn.Module:
        if (index, num_stages) not in self._built:
            self._built[index, num_stages] = self.prepare(self.model.build_stage(index, num_stages))
        return self._built[index, num_stages]

    def parameter_bytes(self, timetable: Timetable) -> int:
        """Of this rank's stages, buffers too."""
        stages = self.stages(timetable).values()
        tensors: list[Any] = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
        return sum(tensor.nbytes for tensor in tensors)

    def meet(self) -> None:
        """All ranks leave here at the same time, nearly."""
        if self.here.size > 1:
            dist.barrier()

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.here.device.type == "cuda":
            torch.cuda.synchronize(self.here.device)
