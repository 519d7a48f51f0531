"""Ties inside one rank: copies of one parameter in several of its sharded stages.

Sharded stages can't share a Parameter, since FSDP2 gives each stage parameters of its own. So each stage gets
a copy, and the copies are tied. Their gradients are summed as those of other ranks are (tied_gradients.py):

    begin               the first copy keeps the gradient of earlier steps, the other copies' are set to zero
    sum_into_first      after the last W: the first copy's gradient becomes the sum over this rank
                        (if other ranks have copies, too, TiedGradients sums the first copies of all ranks)
    copy_from_first     all copies of this rank get that sum

The copies start equal and are trained alike, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.mesh import local_of
from zbpp.runtime.ties import Tie, declare, replace_parameter


def untie(stages: Mapping[int, nn.Module]) -> None:
    """Give each stage its own copy of a parameter that an earlier stage has, too, and declare the tie.

    Call this before the stages are sharded. Raises ValueError if the parameter has the same name in both
    stages: then a name would stand for two tensors.
    """
    first: dict[int, tuple[int, str]] = {}
    for index, stage in sorted(stages.items()):
        for name, parameter in list(stage.named_parameters()):
            place = first.setdefault(id(parameter), (index, name))
            if place[0] == index:
                continue
            if place[1] == name:
                raise ValueError(
                    f"stages {place[0]} and {index} share the parameter {name}, and shards need two names "
                    "for its copies: give it another name in one of the stages, or use replicate= instead"
                )
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            replace_parameter(stage, parameter, copy)
            declare(stage, name, place)


class LocalTies:
    """The parameters of this rank's sharded stages that are tied to each other.

    ties: of all ranks. The constructor gives all copies the first one's values.
    """

    def __init__(self, ties: Sequence[Tie], stages: Mapping[int, nn.Module]) -> None:
        self._groups: list[list[nn.Parameter]] = []
        for tie in ties:
            found = [stages[stage].get_parameter(name) for stage, name in tie if stage in stages]
            group = [*dict.fromkeys(found)]
            if len(group) > 1:
                self._groups.append(group)
        for first, *others in self._groups:
            for other in others:
                with torch.no_grad():
                    local_of(other.detach()).copy_(local_of(first.detach()))

    @property
    def copies(self) -> list[nn.Parameter]:
        """All but the first of each tie."""
        return [each for _, *others in self._groups for each in others]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The first ones and their copies."""
        return [each for group in self._groups for each in group]

    def begin(self) -> None:
        """Set the gradients of copies to zero: the first one's holds the sum of earlier steps."""
        for copy in self.copies:
            total = total_of(copy)
            if total is not None:
                local_of(total).zero_()

    def sum_into_first(self) -> None:
        """Add the copies' gradients to the first one's."""
        for first, *others in self._groups:
            for other in others:
                total, part = total_of(first), total_of(other)
                if total is None and part is not None:
                    first.grad = part.clone()
                elif total is not None and part is not None:
                    local_of(total).add_(local_of(part))

    def copy_from_first(self) -> None:
        """Give the copies the first one's gradient."""
        for first, *others in self._groups:
            total = total_of(first)
            for other in others:
                if total is not None:
                    other.grad = total.clone()
