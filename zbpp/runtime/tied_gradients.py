"""Copies of one parameter on several ranks of a pipeline: equal values, and one gradient, the sum of theirs.

    rank 0   embedding.weight   gradient a     begin: what earlier steps left in it stays
    rank 3   head.weight        gradient b     begin: what earlier steps left in it is zeroed, a has it, too
             after the step     a + b on both ranks

The sums are made when a rank has done all its work of the step. Then they are averaged over replicas: a
replica that was averaged first would have to know which part of its gradient was new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from zbpp.autograd.leaf_grad import grad_dtype, total_of
from zbpp.runtime.groups import close_groups, group_of, unique_name
from zbpp.runtime.mesh import copy_from
from zbpp.runtime.reduce import AllReduce
from zbpp.runtime.ties import Tie, text_of
from zbpp.runtime.world import broadcast, check_agreement


class TiedGradients:
    """This rank's parameters that have copies on other ranks of its pipeline.

    ties: of all ranks. Collective over the pipeline's group: makes a group for each set of ranks that have
    copies, and gives all copies the first one's values.

    parameters: all of them. copies: those that another rank owns. A copy begins each step with a gradient of
    zero; so what the caller adds to gradients before a step has to be added on the owner.
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
        across = [tie for tie in ties if len(_ranks(tie, rank_of)) > 1]
        prefix = broadcast(unique_name(), group) if across else ""
        self._shared: list[_Shared] = []
        for ranks in sorted({_ranks(tie, rank_of) for tie in across}):
            together = group_of(ranks, group, f"{prefix}/tied_{ranks}", timeout)
            if together is not None:
                own = {tie: _parameter(tie, stages) for tie in across if _ranks(tie, rank_of) == ranks}
                for tie, parameter in own.items():
                    copy_from(ranks.index(rank_of[tie[0][0]]), parameter, together)
                what = f"rank {rank}, summing the gradients of tied parameters over ranks {ranks}"
                sums = AllReduce(own.values(), together, average=False, what=what)
                self._shared.append(_Shared(together, own, sums))
        mine = [row for shared in self._shared for row in shared.parameters.items()]
        self.parameters = [parameter for _, parameter in mine]
        self.copies = [parameter for tie, parameter in mine if rank_of[tie[0][0]] != rank]
        self._is_checked = False

    def check(self) -> None:
        """Called before a step's first F.

        Before the first step AgreementError is raised, on all ranks that have copies, if copies have
        gradients of different dtypes, or if some of them are frozen.
        """
        for shared in () if self._is_checked else self._shared:
            kinds = {text_of(tie): _kind(parameter) for tie, parameter in shared.parameters.items()}
            check_agreement("gradients of tied parameters", kinds, shared.group)
        self._is_checked = True

    def begin(self) -> None:
        """Forget in the copies what earlier steps have added: the owner's gradient holds it, too."""
        for copy in self.copies:
            total = total_of(copy)
            if total is not None:
                total.zero_()

    def finish(self) -> None:
        """Sum the gradients of all copies."""
        for shared in self._shared:
            shared.sums.start()
            shared.sums.finish()

    def close(self) -> None:
        """Leave the groups that were made here."""
        close_groups(shared.group for shared in self._shared)
        self._shared.clear()


class _Shared(NamedTuple):
    """Parameters that the same ranks have copies of."""

    group: dist.ProcessGroup
    parameters: Mapping[Tie, nn.Parameter]
    sums: AllReduce


def _ranks(tie: Tie, rank_of: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({rank_of[stage] for stage, _ in tie}))


def _parameter(tie: Tie, stages: Mapping[int, nn.Module]) -> nn.Parameter:
    return next(stages[stage].get_parameter(name) for stage, name in tie if stage in stages)


def _kind(parameter: nn.Parameter) -> str:
    if not parameter.requires_grad:
        return "frozen"
    main = getattr(parameter, "main_grad", None)
    return str(grad_dtype(parameter) if main is None else main.dtype)
