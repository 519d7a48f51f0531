"""Tied parameters of a library's model: one Parameter under several names, such as embedding and head.

The library assigns one Parameter to several modules. So a tie is seen in the modules, whatever the form of
the model's `_tied_weights_keys`. The first name in the order of the modules is the source: the library keeps
the initial values of that one. All other names are aliases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


def names_of(model: nn.Module) -> list[str]:
    """The names of all parameters; a tied one has several."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def aliases_of(model: nn.Module) -> dict[str, str]:
    """{alias: source} of all tied parameters; the sources themselves are no keys."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everyone = model.named_parameters(remove_duplicate=False)
    sources = {name: first[id(parameter)] for name, parameter in everyone}
    return {name: source for name, source in sources.items() if name != source}


def assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make `parameter` the model's parameter of that name."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = parameter


def untie(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Give each alias a Parameter of its own, which shares the source's memory."""
    for name in aliases:
        parameter = model.get_parameter(name)
        assign(model, name, nn.Parameter(parameter.detach(), parameter.requires_grad))


@contextmanager
def untied(model: nn.Module) -> Iterator[dict[str, str]]:
    """A context in which the model is untied; yields its aliases."""
    aliases = aliases_of(model)
    untie(model, aliases)
    try:
        yield aliases
    finally:
        for name, source in aliases.items():
            assign(model, name, model.get_parameter(source))


def summed_gradients(stages: Iterable[nn.Module], aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """{source: the sum of the gradients under all names of the parameter, in all stages}."""
    sums: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            source = aliases.get(name, name)
            if parameter.grad is not None:
                sums[source] = sums[source] + parameter.grad if source in sums else parameter.grad
    return sums
