"""Copies of one parameter on several ranks of a pipeline: equal values, and one gradient, the sum of theirs.

                                before a step    begin     the W's add    finish
    rank 0   embedding.weight   g                g         a              g + a + b
    rank 3   head.weight        g                0         b              g + a + b

g is the gradient of earlier steps. Both ranks have it, and it must count once. The gradients are summed over
ranks when a rank has done all its work of the step. Replicas are averaged after that; shards were averaged
before, by FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from zbpp.autograd.hooks import hooked_nodes
from zbpp.autograd.leaf_grad import grad_dtype, total_of
from zbpp.features.reductions.reduce import AllReduce
from zbpp.job.agreement import AgreementError, broadcast, check_agreement, gather, refuse_together
from zbpp.runtime.digest import digest
from zbpp.runtime.processes.dtensors import copy_from
from zbpp.runtime.processes.groups import close_groups, group_of, unique_name
from zbpp.runtime.processes.ties import Tie, copies_here, owner_of, parameter_of, ranks_of, text_of


class TiedGradients:
    """This rank's parameters that have copies on other ranks of its pipeline.

    ties: of all ranks. The constructor makes a process group for each set of ranks that have copies, and
    gives all copies the owner's values; the first place's rank owns the parameter. Collective over `group`,
    the pipeline's.

    parameters: all that have copies. The gradient of a copy that another rank owns is set to zero at the
    begin of a step, so a caller who adds to gradients between steps adds on the owner.
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
        self._rank_of = rank_of
        across = [tie for tie in ties if len(ranks_of(tie, rank_of)) > 1]
        prefix = broadcast(unique_name(), group) if across else ""
        self._shared: list[_Shared] = []
        for ranks in sorted({ranks_of(tie, rank_of) for tie in across}):
            together = group_of(ranks, group, f"{prefix}/tied_{ranks}", timeout)
            if together is not None:
                own = {tie: parameter_of(tie, stages) for tie in across if ranks_of(tie, rank_of) == ranks}
                what = f"rank {rank}, summing the gradients of tied parameters over ranks {ranks}"
                sums = AllReduce(own.values(), together, divisor=1, what=what)
                self._shared.append(_Shared(ranks, together, own, sums))
        self.copy_values()
        mine = [row for shared in self._shared for row in shared.parameters.items()]
        self.parameters = [parameter for _, parameter in mine]
        self._copies = copies_here(ties, stages, rank_of, rank)
        self._is_checked, self._num_steps = False, 0

    def copy_values(self) -> None:
        """Give all copies the owner's values. Collective over the ranks that have copies."""
        for shared in self._shared:
            for tie, parameter in shared.parameters.items():
                copy_from(shared.ranks.index(owner_of(tie, self._rank_of)), parameter, shared.group)

    def check(self) -> None:
        """Called before a step's first F.

        Raises ValueError for hooks on copies, before the first step on all ranks that have copies. Before the
        first step AgreementError is raised there, too, if copies have gradients of different dtypes, or if
        some of them are frozen.
        """
        if not self._is_checked:
            for each in self._shared:
                kinds = {text_of(tie): _kind(parameter) for tie, parameter in each.parameters.items()}
                check_agreement("gradients of tied parameters", kinds, each.group, each.ranks)
                refuse_together(_refusal(each.parameters), partial(gather, group=each.group))
            self._is_checked = True
        for each in self._shared:
            if refusal := _refusal(each.parameters):
                raise ValueError(refusal)

    def begin(self) -> None:
        """Set the gradients of copies to zero: the owner's gradient holds the sum of earlier steps."""
        for copy in self._copies:
            total = total_of(copy)
            if total is not None:
                total.zero_()

    def finish(self) -> None:
        """Give every copy the sum of all copies' gradients.

        After step 1, 2, 4, 8, ... AgreementError is raised on all ranks that have copies if they differ.
        """
        self._num_steps += 1
        if self._num_steps.bit_count() == 1:
            self._check_values()
        for shared in self._shared:
            shared.sums.start()
            shared.sums.finish()

    def _check_values(self) -> None:
        for each in self._shared:
            mine = [int(digest(parameter)) for parameter in each.parameters.values()]
            of_ties = zip(each.parameters, *gather(mine, each.group), strict=True)
            different = [text_of(tie) for tie, *values in of_ties if len(set(values)) > 1]
            if different:
                raise AgreementError(
                    f"{different[0]} are tied, and the copies differ before the update of step "
                    f"{self._num_steps}: the ranks' optimizers need the same options for them. Group "
                    "parameters by pipeline.parameter_names(), which has all names of each on every rank"
                )

    def close(self) -> None:
        """Close the groups that were made here."""
        close_groups(shared.group for shared in self._shared)
        self._shared.clear()


class _Shared(NamedTuple):
    """The tied parameters that one set of ranks has copies of."""

    ranks: tuple[int, ...]  # in the pipeline
    group: dist.ProcessGroup
    parameters: Mapping[Tie, nn.Parameter]
    sums: AllReduce


def _refusal(parameters: Mapping[Tie, nn.Parameter]) -> str:
    """Why the copies can't get one gradient, or nothing."""
    hooked = hooked_nodes([each for each in parameters.values() if each.requires_grad])
    found = next((text_of(tie) for tie, each in parameters.items() if id(each) in hooked), "")
    return found and (
        f"{found} are tied, are on different ranks, and have a hook, which would see the gradient of one "
        "copy only: remove the hook and read the gradient after step(), or choose a schedule that puts "
        "these stages on one rank, such as zb_v"
    )


def _kind(parameter: nn.Parameter) -> str:
    """The dtype in which the parameter's gradients are summed, or `frozen`."""
    if not parameter.requires_grad:
        return "frozen"
    main = getattr(parameter, "main_grad", None)
    return str(grad_dtype(parameter) if main is None else main.dtype)
