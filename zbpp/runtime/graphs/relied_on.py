"""What a capture relies on: where weights and buffers are, modes, hooks. A change makes a new capture.

A replay reads weights and buffers at the addresses that they had in the capture, and runs no Python. What
else forward reads from Python objects (a global variable, a list in an attribute) is not looked at:
docs/compiled.md says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.graphs.maker import NotCapturable

_NUMBERS = frozenset({bool, int, float, str, type(None)})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def relied_on(modules: Iterable[nn.Module], device: torch.device) -> tuple[Any, ...]:
    """What must be as it was in the capture. Equal tuples: the graphs still fit."""
    found: list[Any] = [torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)]
    for module in modules:
        for each in module.modules():
            found += [id(each), each.training, sum(len(getattr(each, name)) for name in _HOOKS)]
            for parameter in each._parameters.values():
                if parameter is not None:
                    found += _of_parameter(parameter)
            found += [
                (id(buffer), buffer.data_ptr()) for buffer in each._buffers.values() if buffer is not None
            ]
    return tuple(found)


def _of_parameter(parameter: Tensor) -> Iterator[Any]:
    main = getattr(parameter, "main_grad", None)
    yield id(parameter)
    yield parameter.data_ptr()
    yield parameter.requires_grad
    yield None if main is None else main.data_ptr()
    yield len(parameter._backward_hooks or ())
    yield len(parameter._post_accumulate_grad_hooks or ())


def numbers(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """The numbers and texts among the modules' attributes, such as a Dropout's p: a replay uses the old ones.

    Forward may change them itself (a counter), so they are compared from the end of a capture on.
    """
    return tuple(
        value
        for root in modules
        for module in root.modules()
        for value in module.__dict__.values()
        if type(value) in _NUMBERS
    )


class HeldTensors:
    """The tensors that modules hold, as buffers or in other attributes, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for root in modules:
            for path, module in root.named_modules():
                name = f"{path}{'.' if path else ''}{{}} of {type(root).__name__}"
                self._tables += [
                    (name, table, _tensors_in(table)) for table in (module._buffers, module.__dict__)
                ]

    def check(self) -> None:
        """Raise NotCapturable if a tensor has come, or has taken another one's place."""
        for name, table, before in self._tables:
            for key, tensor in _tensors_in(table).items():
                if before.get(key) is not tensor:
                    raise NotCapturable(
                        f"forward replaces {name.format(key)}, which a replay would not do: change it in "
                        "place (copy_)"
                    )

    def restore(self) -> None:
        """Give the modules their tensors again: those of a capture were never computed."""
        for _, table, before in self._tables:
            for key in _tensors_in(table):
                if key not in before:
                    del table[key]
            table.update(before)


def _tensors_in(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if isinstance(value, Tensor)}


def refuse_parameters(modules: Iterable[nn.Module]) -> None:
    """Raise NotCapturable for parameters whose gradients a replay would get wrong."""
    for name, parameter in _named_parameters(modules):
        if parameter._post_accumulate_grad_hooks:
            raise NotCapturable(f"{name} has a post-accumulate-grad hook, which a replay would not run")
        if type(parameter.data) is not Tensor:
            raise NotCapturable(f"{name} is a {type(parameter.data).__name__}")


def hooked(modules: Iterable[nn.Module]) -> list[str]:
    """What has hooks that run in a capture only, for a warning."""
    found = [
        f"module {path or type(module).__name__}"
        for root in modules
        for path, module in root.named_modules()
        if any(getattr(module, name) for name in _HOOKS)
    ]
    return found + [f"weight {name}" for name, each in _named_parameters(modules) if each._backward_hooks]


def _named_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for module in modules:
        yield from module.named_parameters()
