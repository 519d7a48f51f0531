"""What a capture relies on: places of weights and buffers, modes, hooks, settings. A change needs a new one.

A replay reads weights and buffers at the addresses that they had in the capture, and runs no Python. Of the
Python objects that forward reads, attributes.py sees those that are attributes of modules; docs/compiled.md
says what is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.graphs.attributes import address
from zbpp.runtime.graphs.call import CallLayout

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "autocast": lambda kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
    "deterministic algorithms": lambda _: torch.are_deterministic_algorithms_enabled(),
    "the precision of float32 products": lambda _: torch.get_float32_matmul_precision(),
    "the kinds of attention": lambda _: (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    ),
    "the hooks of all modules": lambda _: tuple([key for each in _GLOBAL_HOOKS for key in each]),
}
_OF_A_MODULE = ("the place or the class", "the mode (train, eval)", "a hook")

Key = tuple[Any, ...]


def relied_on(modules: Iterable[nn.Module], device: torch.device) -> tuple[Key, Key]:
    """What must be as it was in the capture: (settings, modules). Equal: the graphs still fit."""
    settings = tuple([_setting(name, device.type) for name in _SETTINGS])
    return settings, tuple([_of_module(each) for root in modules for each in root.modules()])


def _setting(name: str, kind: str) -> Any:
    with suppress(RuntimeError):  # torch refuses to say the precision after both of its ways to set it
        return _SETTINGS[name](kind)


def _of_module(module: nn.Module) -> Key:
    # The key of a hook is its number, and no two hooks of a process have the same one.
    hooks = tuple([number for name in _HOOKS for number in getattr(module, name)])
    weights = [(name, _of_parameter(each)) for name, each in module._parameters.items() if each is not None]
    buffers = [(name, address(each)) for name, each in module._buffers.items() if each is not None]
    place = id(module), type(module), type(module).forward
    return place, module.training, hooks, tuple(weights), tuple(buffers)


def _of_parameter(parameter: Tensor) -> Key:
    main = getattr(parameter, "main_grad", None)
    hooks = (*(parameter._backward_hooks or ()), None, *(parameter._post_accumulate_grad_hooks or ()))
    return address(parameter), parameter.requires_grad, None if main is None else address(main), hooks


class Basis:
    """All that two calls must have alike to be served by the same graphs."""

    def __init__(self, call: CallLayout, modules: Iterable[nn.Module], device: torch.device) -> None:
        self.modules = [*modules]
        self.call, (self._settings, self._relied_on) = call, relied_on(self.modules, device)

    def __eq__(self, other: object) -> bool:
        """Whether both are alike; a comparison of a user's values that raises counts as a difference."""
        with suppress(Exception):
            return isinstance(other, Basis) and bool(
                self.call == other.call
                and self._settings == other._settings
                and self._relied_on == other._relied_on
            )
        return False

    __hash__ = None  # type: ignore[assignment]

    def changed(self, before: Basis) -> str:
        """What is different from an earlier one, the first thing found."""
        if self.call != before.call:
            return self.call.changed(before.call)
        for name, one, other in zip(_SETTINGS, before._settings, self._settings, strict=True):
            if one != other:
                return f"{name}: torch's setting has changed"
        places = [(path, type(root).__name__) for root in self.modules for path, _ in root.named_modules()]
        if len(before._relied_on) == len(self._relied_on) == len(places):
            for place, one, other in zip(places, before._relied_on, self._relied_on, strict=True):
                if one != other:
                    return _changed_in(*place, one, other)
        return "the modules of a stage have changed"


def _changed_in(path: str, root: str, one: Key, other: Key) -> str:
    for what, before, now in zip(_OF_A_MODULE, one, other, strict=False):
        if before != now:
            return f"{what} of {path or root} has changed"
    before, now = ({**dict(each[-2]), **dict(each[-1])} for each in (one, other))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    name = ".".join([path] * bool(path) + keys[:1])
    return f"the place, the layout or the hooks of {name} of {root} have changed"


def changed_attribute(modules: Iterable[nn.Module], before: Any, now: Any) -> str:
    """Which attribute has changed, the first one whose marks differ (see attributes.py)."""
    names = [type(module).__name__ for root in modules for module in root.modules()]
    for name, one, other in zip([*names, "the loss"], before, now, strict=False):
        tables = dict(one), dict(other)
        for key in {**tables[0], **tables[1]}:
            if tables[0].get(key) != tables[1].get(key):
                return f"{key} of {name} has changed"
    return "an attribute of a module has changed"
