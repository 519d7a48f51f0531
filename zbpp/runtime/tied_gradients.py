"""Copies of one parameter on several ranks of a pipeline: equal values, and one gradient, the sum of theirs.

    rank 0   embedding.weight   gradient a     begin: what earlier steps left in it stays
    rank 3   head.weight        gradient b     begin: what earlier steps left in it is zeroed, a has it, too
             after the step     a + b on both ranks

The sums are made when a rank has done all its work of the step. Then they are averaged over replicas: a
replica that was averaged first would have to know which part of its gradient was new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.groups import close_groups, group_of, unique_name
from zbpp.runtime.mesh import copy_from
from zbpp.runtime.reduce import AllReduce
from zbpp.runtime.ties import Tie
from zbpp.runtime.world import broadcast


class TiedGradients:
    """This rank's parameters that have copies on other ranks of its pipeline.

    ties: of all ranks. Collective over the pipeline's group: makes a group for each set of ranks that have
    copies, and gives all copies the first one's values.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        stages: Mapping[int, nn.Module],
        rank_of: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        self.parameters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []  # those that another rank owns
        self._groups: list[dist.ProcessGroup] = []
        self._sums: list[AllReduce] = []
        across = [tie for tie in ties if len(_ranks(tie, rank_of)) > 1]
        prefix = broadcast(unique_name(), group) if across else ""
        for ranks in sorted({_ranks(tie, rank_of) for tie in across}):
            together = group_of(ranks, group, f"{prefix}/tied_{ranks}", timeout)
            if together is None:
                continue
            mine = [tie for tie in across if _ranks(tie, rank_of) == ranks]
            parameters = [_parameter(tie, stages) for tie in mine]
            owners = [rank_of[tie[0][0]] for tie in mine]
            for parameter, owner in zip(parameters, owners, strict=True):
                copy_from(ranks.index(owner), parameter, together)
            self.copies += [each for each, owner in zip(parameters, owners, strict=True) if owner != rank]
            self.parameters += parameters
            self._groups.append(together)
            what = f"rank {rank}, summing the gradients of tied parameters over ranks {ranks}"
            self._sums.append(AllReduce(parameters, together, average=False, what=what))

    def begin(self) -> None:
        """Forget in the copies what earlier steps have added: the owner's gradient holds it, too."""
        for copy in self.copies:
            total = total_of(copy)
            if total is not None:
                total.zero_()

    def finish(self) -> None:
        """Sum the gradients of all copies."""
        for each in self._sums:
            each.start()
            each.finish()

    def close(self) -> None:
        """Leave the groups that were made here."""
        close_groups(self._groups)
        self._groups.clear()


def _ranks(tie: Tie, rank_of: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({rank_of[stage] for stage, _ in tie}))


def _parameter(tie: Tie, stages: Mapping[int, nn.Module]) -> nn.Parameter:
    return next(stages[stage].get_parameter(name) for stage, name in tie if stage in stages)
