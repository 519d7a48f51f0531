"""Freezing parameters of a model by patterns of their names in the whole model.

    freeze   parameters that match are not trained
    train    only parameters that match are trained

A frozen parameter has no gradient, no optimizer state, no W, and F keeps no input for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zbpp.runtime import Pipeline
from zbpp.training.parameter_groups import check_all_match


def freeze(
    stage: nn.Module, freeze: Sequence[str], train: Sequence[str], tied: Mapping[str, str] | None = None
) -> None:
    """Freeze parameters of a stage. tied: the model's `tied()`; a tied parameter matches by all its names."""
    aliases = _aliases(tied or {})
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).update(aliases.get(name, {name}))
    for parameter, own in names.items():
        if _match(own, freeze) or (train and not _match(own, train)):
            parameter.requires_grad_(False)


def check_frozen(pipeline: Pipeline, freeze: Sequence[str], train: Sequence[str]) -> None:
    """Raise ValueError on all ranks for a pattern without match, and if nothing is trained. Collective."""
    check_all_match(pipeline, freeze, "freeze")
    check_all_match(pipeline, train, "train")
    if (freeze or train) and not any(
        pipeline.place.gather(any(each.requires_grad for each in pipeline.parameters()))
    ):
        raise ValueError("freeze and train leave no parameter to train: write fewer patterns in freeze")


def _match(names: Collection[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _aliases(tied: Mapping[str, str]) -> dict[str, set[str]]:
    """{name of a tied parameter: all names of that parameter}."""
    groups: dict[str, set[str]] = {}
    for name, other in tied.items():
        joined = {name, other} | groups.get(name, set()) | groups.get(other, set())
        groups |= dict.fromkeys(joined, joined)
    return groups
