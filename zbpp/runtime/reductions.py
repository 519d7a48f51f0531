"""All reductions of one rank in a step: the gradients of its stages, then those of tied parameters.

when                          what                                                     by
after a stage's last W        the stage's gradients, over replicas or shards           AllReduce, FSDP2
when all of these have ended  tied parameters of sharded stages, over this rank        LocalCopies
                              tied parameters, over the pipeline's ranks               TiedGradients
then                          parameters of several stages, and of the loss, over      AllReduce
                              replicas and shards
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.copies import LocalCopies
from zbpp.runtime.fully_shard import Reshard
from zbpp.runtime.gradient_release import GradientRelease
from zbpp.runtime.groups import close_groups, group_like
from zbpp.runtime.mesh import REPLICATE, SHARD, Place, copy_to_replicas, is_sharded, local_of
from zbpp.runtime.reduce import AllReduce, Ended, Reducer
from zbpp.runtime.sharding import shard_stages
from zbpp.runtime.stage import AroundW
from zbpp.runtime.tied_gradients import TiedGradients
from zbpp.runtime.ties import Tie
from zbpp.runtime.world import communicating


class Reductions:
    """The reducers of one rank's stages, its tied parameters, and the weights that FSDP2 gathers.

    The constructor gives all replicas of a stage the values of the first one. ties: of all ranks. reshard,
    mp_policy: as in Pipeline. loss: the parameters of the loss that no stage has; their gradients are
    averaged, too. Collective over the mesh.
    gradient_release: what is done with a stage's gradients when they are final; None: they stay.
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
        self.gradient_release: GradientRelease | None = None
        self._sharded = shard_stages(stages, place, rank, reshard, mp_policy)
        self._tied = TiedGradients(ties, stages, rank_of, rank, group, timeout)
        self._copies = LocalCopies(ties, stages)
        self._reducers: dict[int, Reducer] = dict(self._sharded)
        self._groups: list[dist.ProcessGroup] = []
        self._last: list[AllReduce] = []  # they start when all stages and all ties are reduced
        self._stages, self._rank = stages, rank
        self._ids = list(map(id, _parameters(stages)))  # of the parameters that are reduced
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
        """Make reducers that average over one group; give its processes the values of the first of them.

        FSDP2 averages the gradients of sharded stages itself: for these no reducer is made here.
        """
        self._groups.append(group)
        # The gradient of a parameter that several stages have is complete after the last W of all of them.
        late = [] if self._sharded else [*dict.fromkeys([*self._tied.parameters, *_shared_by(stages)])]
        late_ids = set(map(id, late))
        for index, stage in stages.items():
            if index not in self._sharded:
                own = [each for each in stage.parameters() if id(each) not in late_ids]
                what = f"rank {rank}, averaging the gradients of stage {index} over its replicas"
                self._reducers[index] = AllReduce(own, group, average=True, what=what)
        buffers = [buffer for stage in stages.values() for buffer in stage.buffers()]
        copy_to_replicas((*copied, *loss, *buffers), group)
        what = f"rank {rank}, averaging the gradients of tied parameters and of the loss over replicas"
        self._last.append(AllReduce([*late, *loss], group, average=True, what=what))

    @property
    def copies(self) -> list[nn.Parameter]:
        """The tied parameters whose first copy is on another rank, or in another sharded stage."""
        return [*self._tied.copies, *self._copies.copies]

    @property
    def late(self) -> list[nn.Parameter]:
        """The parameters whose gradients are final only when all stages' are."""
        return [*self._tied.parameters, *self._copies.parameters, *_shared_by(self._stages)]

    def _check_parameters(self) -> None:
        """Raise ValueError for parameters that the user has changed in a way that reductions don't allow."""
        if not self.is_shared:
            return
        parameters = _parameters(self._stages)
        if self._ids != list(map(id, parameters)):
            raise ValueError(
                "parameters were added or replaced after the Pipeline was made, and their gradients would "
                "not be reduced: make a new Pipeline"
            )
        if any(each._post_accumulate_grad_hooks for each in parameters if not is_sharded(each)):
            raise ValueError(
                "a parameter has a hook by register_post_accumulate_grad_hook, which would run in W, before "
                "the gradient is reduced over replicas and tied copies: read gradients after step() instead"
            )

    @property
    def is_shared(self) -> bool:
        """Whether other processes wait for this one's gradients."""
        return bool(self._reducers) or bool(self._tied.parameters)

    def reduces(self, stage: int) -> bool:
        """Whether there is anything to reduce when the stage's gradients are complete on this rank."""
        return stage in self._reducers

    def begin(self) -> None:
        """Called before the first F of a step."""
        self._check_parameters()
        self._tied.check()
        for reducer in self._reducers.values():
            reducer.begin()

    def begin_gradients(self) -> None:
        """Called before the first backward of a step, which is the first to change gradients."""
        self._tied.begin()
        self._copies.begin()

    def start(self, stage: int, ended: Ended | None = None) -> None:
        """Start to reduce a stage, whose gradients are complete on this rank; see Reducer.start."""
        self._reducers[stage].start(ended)

    def complete(self, stage: int) -> None:
        """The stage's gradients are final on all its copies."""
        if self.gradient_release is not None:
            self.gradient_release.complete(stage)

    def finish(self) -> None:
        """Wait for the stages, then reduce the rest; afterwards all copies of a parameter have one gradient.

        Also gives all replicas the first one's buffers.
        """
        for stage, reducer in self._reducers.items():
            reducer.finish()
            self.complete(stage)
        self._copies.sum_into_first()
        self._tied.finish()
        self._copies.copy_from_first()
        for each in self._last:
            each.start()
            each.finish()
        for group in self._groups:
            with communicating(f"rank {self._rank}, copying buffers of the first replica"):
                copy_buffers(self._stages.values(), group)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the stages run forward without gradients."""
        with ExitStack() as stack:
            for stage in self._sharded.values():
                stack.enter_context(stage.evaluating())
            yield

    def around_w(self, stage: int) -> AroundW | None:
        """The context in which each W of a stage has to run; None if W needs no weights gathered for it."""
        sharded = self._sharded.get(stage)
        return sharded.gathered_for if sharded is not None and sharded.frees_before_w else None

    def abandon(self) -> None:
        """Let all reducers drop what a failed step has left."""
        for reducer in self._reducers.values():
            reducer.abandon()

    def close(self) -> None:
        """Close the groups that were made here: processes that wait for this one stop waiting."""
        self._tied.close()
        self._reducers.clear()  # gloo closes a group's connections once nothing refers to it
        self._last.clear()
        close_groups(self._groups)
        self._groups.clear()


def copy_buffers(stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Give all buffers the values that they have on the group's first process. Collective over the group.

    All of them, because changed buffers can't be told apart: BatchNorm's kernel changes its statistics and
    does not raise their count of in-place changes.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for stage in stages:
        for buffer in stage.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(local_of(buffer))
    for buffers in by_dtype.values():
        values = torch.cat([each.reshape(-1) for each in buffers])
        dist.broadcast(values, group=group, group_src=0)
        for buffer, part in zip(buffers, values.split([each.numel() for each in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def _parameters(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    return [*dict.fromkeys(each for stage in stages.values() for each in stage.parameters())]


def _shared_by(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """The parameters that more than one of the stages have."""
    counts = Counter(each for stage in stages.values() for each in stage.parameters())
    return [parameter for parameter, count in counts.items() if count > 1]
