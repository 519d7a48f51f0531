"""Copies of one parameter on one rank: sharded stages can't share a parameter object, since FSDP2 gives each
stage parameters of its own.

    stage 0   embedding.weight   gradient a     begin: what earlier steps left in it stays
    stage 3   head.weight        gradient b     begin: zeroed, the first one's gradient holds it, too
              after the step     a + b in both, once ranks with further copies have added theirs

The copies start equal and are trained alike, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.mesh import local_of
from zbpp.runtime.ties import Tie


def untie(stages: Mapping[int, nn.Module]) -> None:
    """Give each stage its own copy of a parameter that an earlier stage has, too, and declare the tie.

    To be called before the stages are sharded; a sharded stage has parameters of its own.

    Raises ValueError if the parameter has the same name in both: then names could not tell copies apart.
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
            _replace(stage, parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            known = getattr(stage, "tied_parameters", None) or {}
            stage.tied_parameters = {**known, name: place}  # type: ignore[assignment]  # a plain attribute


def _replace(stage: nn.Module, parameter: nn.Parameter, other: nn.Parameter) -> None:
    for module in stage.modules():
        for name, each in module.named_parameters(recurse=False, remove_duplicate=False):
            if each is parameter:
                setattr(module, name, other)


class LocalCopies:
    """The sharded parameters of this rank that are tied to each other. Their values become the first one's.

    ties: of all ranks.
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
        """All but the first of each."""
        return [each for _, *others in self._groups for each in others]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The first ones and their copies."""
        return [each for group in self._groups for each in group]

    def begin(self) -> None:
        """Forget in the copies what earlier steps have added."""
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
