"""What is reduced on one rank after the last W's of a step: its stages' gradients, then tied parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.groups import close_groups, group_like
from zbpp.runtime.mesh import REPLICATE, Place, copy_from
from zbpp.runtime.reduce import AllReduce, Ended, Reducer
from zbpp.runtime.tied_gradients import TiedGradients


class Reductions:
    """The reducers of one rank's stages, and its tied parameters.

    Replicas of a stage start with the values of the first one. Collective over the mesh.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], tied: TiedGradients, place: Place, rank: int, timeout: float
    ) -> None:
        self._tied = tied
        self._reducers: dict[int, Reducer] = {}
        self._replicas: dist.ProcessGroup | None = None
        self._tied_average: AllReduce | None = None
        self._buffers: Buffers | None = None
        if REPLICATE in place.groups:
            self._replicate(stages, place, rank, timeout)

    def _replicate(self, stages: Mapping[int, nn.Module], place: Place, rank: int, timeout: float) -> None:
        _check_dense(stages)
        self._replicas = group = group_like(place.groups[REPLICATE], timeout)
        seen = {id(each) for each in self._tied.parameters}
        for index, stage in stages.items():
            own = [each for each in stage.parameters() if id(each) not in seen]
            seen |= set(map(id, own))
            what = f"rank {rank}, averaging the gradients of stage {index} over its replicas"
            self._reducers[index] = AllReduce(own, group, average=True, what=what)
            copy_to_replicas((*stage.parameters(), *stage.buffers()), group)
        what = f"rank {rank}, averaging the gradients of tied parameters over replicas"
        self._tied_average = AllReduce(self._tied.parameters, group, average=True, what=what)
        self._buffers = Buffers(stages.values(), group)

    @property
    def is_shared(self) -> bool:
        """Whether other processes wait for this one's gradients."""
        return bool(self._reducers) or bool(self._tied.parameters)

    def reduces(self, stage: int) -> bool:
        """Whether there is anything to reduce when the stage's gradients are complete on this rank."""
        return stage in self._reducers

    def begin(self) -> None:
        """Called before the first action of a step."""
        self._tied.begin()
        for reducer in self._reducers.values():
            reducer.begin()

    def start(self, stage: int, ended: Ended | None = None) -> None:
        """The stage's gradients are complete on this rank; see Reducer.start."""
        self._reducers[stage].start(ended)

    def finish(self) -> None:
        """Wait for all; afterwards the gradients are the same on all copies of a parameter."""
        for reducer in self._reducers.values():
            reducer.finish()
        self._tied.finish()
        if self._tied_average is not None:
            self._tied_average.start()
            self._tied_average.finish()
        if self._buffers is not None:
            self._buffers.copy_changed()

    def abandon(self) -> None:
        """Drop what is left of a step that failed."""
        for reducer in self._reducers.values():
            reducer.abandon()

    def close(self) -> None:
        """Leave the groups that were made for this pipeline: processes that wait for this one stop."""
        self._tied.close()
        if self._replicas is not None:
            close_groups([self._replicas])
            self._replicas = None


class Buffers:
    """Buffers that forward changes, such as BatchNorm's statistics: all replicas keep those of the first."""

    def __init__(self, stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
        self._stages, self._group = list(stages), group
        self._versions = {id(each): each._version for each in self._all()}

    def copy_changed(self) -> None:
        """Copy those that were changed since the last call."""
        changed = [each for each in self._all() if self._versions.get(id(each)) != each._version]
        copy_to_replicas(changed, self._group)
        self._versions = {id(each): each._version for each in self._all()}

    def _all(self) -> list[Tensor]:
        return [buffer for stage in self._stages for buffer in stage.buffers()]


def copy_to_replicas(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give each tensor the values that it has on the group's first process. Collective over the group."""
    for tensor in tensors:
        copy_from(0, tensor, group)


def _check_dense(stages: Mapping[int, nn.Module]) -> None:
    for index, stage in stages.items():
        for name, module in stage.named_modules():
            if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                raise ValueError(
                    f"{name} of stage {index} makes sparse gradients, which replicas can't average: write "
                    "sparse=False"
                )
