"""What is reduced on one rank after the last W's of a step: its stages' gradients, then tied parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.copies import LocalCopies
from zbpp.runtime.fully_shard import Reshard
from zbpp.runtime.groups import close_groups, group_like
from zbpp.runtime.mesh import REPLICATE, SHARD, Place, copy_to_replicas, is_sharded
from zbpp.runtime.reduce import AllReduce, Ended, Reducer
from zbpp.runtime.sharding import shard_stages
from zbpp.runtime.stage import AroundW
from zbpp.runtime.tied_gradients import TiedGradients
from zbpp.runtime.ties import Tie


class Reductions:
    """The reducers of one rank's stages, its tied parameters, and the weights that FSDP2 gathers.

    Replicas of a stage start with the values of the first one. ties: of all ranks. reshard, mp_policy: as in
    Pipeline. loss: parameters of the loss, whose gradients are averaged, too. Collective over the mesh.
    Raises ValueError on every process for a stage that can't be sharded.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ties: Sequence[Tie],
        rank_of: Sequence[int],
        place: Place,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        timeout: float,
        reshard: Reshard,
        mp_policy: Any = None,
        loss: Iterable[nn.Parameter] = (),
    ) -> None:
        self._sharded = shard_stages(stages, place, rank, reshard, mp_policy)
        self._tied = TiedGradients(ties, stages, rank_of, rank, group, timeout)
        self._copies = LocalCopies(ties, stages)
        self._reducers: dict[int, Reducer] = dict(self._sharded)
        self._groups: list[dist.ProcessGroup] = []
        self._last: list[AllReduce] = []  # what waits for all stages and for tied parameters
        self._buffers: list[Buffers] = []
        for name in (SHARD, REPLICATE):
            if name in place.groups:
                copied = [each for each in _parameters(stages) if name != SHARD or not is_sharded(each)]
                self._replicate(stages, copied, [*loss], group_like(place.groups[name], timeout), rank)

    def _replicate(
        self,
        stages: Mapping[int, nn.Module],
        copied: list[nn.Parameter],
        loss: list[nn.Parameter],
        group: dist.ProcessGroup,
        rank: int,
    ) -> None:
        """Make copies of these processes equal, and average what FSDP2 does not reduce."""
        _check_dense(stages)
        self._groups.append(group)
        seen = {id(each) for each in self._tied.parameters}
        for index, stage in stages.items():
            if index not in self._sharded:
                own = [each for each in stage.parameters() if id(each) not in seen]
                seen |= set(map(id, own))
                what = f"rank {rank}, averaging the gradients of stage {index} over its replicas"
                self._reducers[index] = AllReduce(own, group, average=True, what=what)
        buffers = [buffer for stage in stages.values() for buffer in stage.buffers()]
        copy_to_replicas((*copied, *loss, *buffers), group)
        tied = [] if self._sharded else self._tied.parameters
        what = f"rank {rank}, averaging the gradients of tied parameters and of the loss over replicas"
        self._last.append(AllReduce([*tied, *loss], group, average=True, what=what))
        self._buffers.append(Buffers(stages.values(), group))

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters that another rank or another stage owns."""
        return [*self._tied.copies, *self._copies.copies]

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
        self._copies.begin()
        for reducer in self._reducers.values():
            reducer.begin()

    def start(self, stage: int, ended: Ended | None = None) -> None:
        """The stage's gradients are complete on this rank; see Reducer.start."""
        self._reducers[stage].start(ended)

    def finish(self) -> None:
        """Wait for all; afterwards the gradients are the same on all copies of a parameter."""
        for reducer in self._reducers.values():
            reducer.finish()
        self._copies.sum_into_first()
        self._tied.finish()
        self._copies.copy_from_first()
        for each in self._last:
            each.start()
            each.finish()
        for buffers in self._buffers:
            buffers.copy_changed()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the stages run forward without gradients."""
        with ExitStack() as stack:
            for stage in self._sharded.values():
                stack.enter_context(stage.evaluating())
            yield

    def around_w(self, stage: int) -> AroundW | None:
        """What W of a stage has to run within, if its weights may be freed before it."""
        sharded = self._sharded.get(stage)
        return sharded.gathered_for if sharded is not None and sharded.frees_before_w else None

    def abandon(self) -> None:
        """Drop what is left of a step that failed."""
        for reducer in self._reducers.values():
            reducer.abandon()

    def close(self) -> None:
        """Leave the groups that were made for this pipeline: processes that wait for this one stop."""
        self._tied.close()
        close_groups(self._groups)
        self._groups.clear()


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


def _parameters(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    return [*dict.fromkeys(each for stage in stages.values() for each in stage.parameters())]


def _check_dense(stages: Mapping[int, nn.Module]) -> None:
    for index, stage in stages.items():
        for name, module in stage.named_modules():
            if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                raise ValueError(
                    f"{name} of stage {index} makes sparse gradients, which replicas can't average: write "
                    "sparse=False"
                )
