"""Weights whose gradients a replay would get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.runtime.graphs.maker import NotCapturable
from zbpp.runtime.stage import StageWorker

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Forward = Callable[[StageWorker, int, Any], Any]


def refuse_parameters(modules: Iterable[nn.Module]) -> None:
    """Raise NotCapturable for parameters whose gradients a replay would get wrong."""
    for name, parameter in _named_parameters(modules):
        if parameter._post_accumulate_grad_hooks:
            raise NotCapturable(f"{name} has a post-accumulate-grad hook, which a replay would not run")
        if type(parameter.data) is not Tensor:
            raise NotCapturable(f"{name} is a {type(parameter.data).__name__}")


def refusing_others(forward: Forward, modules: Iterable[nn.Module]) -> Forward:
    """An F that raises NotCapturable if it uses a weight of none of these modules.

    Nobody gives such a weight a `.grad` at a fixed address. A loss function written as a closure uses one.
    """
    known = {id(each) for _, each in _named_parameters(modules)}

    def checked(worker: StageWorker, microbatch: int, message: Any) -> Any:
        made = forward(worker, microbatch, message)
        for leaf in _leaves(worker.roots(microbatch), worker.ends(microbatch)):
            if id(leaf) not in known:
                raise NotCapturable(
                    f"it uses a weight of shape {tuple(leaf.shape)} that belongs to no stage, and to no loss "
                    "module: let a stage hold it, or write the loss as a module that does"
                )
        return made

    return checked


def _leaves(roots: Iterable[Node], ends: Iterable[Node]) -> Iterator[Tensor]:
    """The tensors in which the gradients of a graph end, without those that belong to `ends`."""
    seen, left = set(ends), [*roots]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions if following is not None]
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf


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
