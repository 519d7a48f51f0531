"""Every kind of hook on parameters, and what each call was given.

seen = Seen()
seen.register("node", module)          # before the first microbatch
...                                    # run microbatches
seen.calls                             # [(name of the parameter, its tensors), ...]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

KINDS = ("tensor", "node prehook", "node hook", "post-accumulate", "all", "any", "module", "several")


class Call(NamedTuple):
    """One call of a hook: the parameter ("" for several), and the gradients or sums that it was given."""

    name: str
    given: list[Tensor | None]


class Seen:
    """Registers hooks of one kind on a module's parameters, and records their calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._nodes: list[Node] = []  # a node lives as long as somebody refers to it

    def register(self, kind: str, module: nn.Module) -> None:
        """Register hooks on all trained parameters. Those that may change a gradient do so."""
        parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        if kind == "all":
            register_multi_grad_hook([*parameters.values()], lambda grads: self._call("", grads))
        elif kind == "any":
            register_multi_grad_hook([*parameters.values()], lambda grad: self._call("", [grad]), mode="any")
        elif kind == "module":
            module.register_full_backward_hook(self._of_module)
        elif kind == "several":
            for each in ("tensor", "node hook", "all", "post-accumulate"):
                self.register(each, module)
        else:
            for name, parameter in parameters.items():
                self._register(kind, name, parameter)

    def _register(self, kind: str, name: str, parameter: nn.Parameter) -> None:
        node = get_gradient_edge(parameter).node
        self._nodes.append(node)
        if kind == "tensor":
            parameter.register_hook(self._changing(name, 0.5, lambda grad: grad))
        elif kind == "node prehook":
            node.register_prehook(self._changing(name, 2.0, lambda grads: (grads[0],)))
        elif kind == "node hook":
            node.register_hook(lambda _, grads: self._call(name, grads))
        else:
            parameter.register_post_accumulate_grad_hook(lambda leaf: self._call(name, [total_of(leaf)]))

    def _changing(self, name: str, factor: float, pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def hook(given: Any) -> Any:
            grads = given if isinstance(given, tuple) else (given,)
            self._call(name, grads)
            changed = tuple(None if grad is None else (grad * factor).clamp(-0.3, 0.3) for grad in grads)
            return changed if isinstance(given, tuple) else changed[0]

        return hook

    def _of_module(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self._call("module", outputs)
        return tuple(None if grad is None else grad * 3 for grad in inputs)

    def _call(self, name: str, given: Any) -> None:
        self.calls.append(Call(name, [None if each is None else each.detach().clone() for each in given]))


def total_of(leaf: Any) -> Tensor | None:
    """Where the leaf's gradients are summed."""
    main = getattr(leaf, "main_grad", None)
    return leaf.grad if main is None else main


def assert_same_calls(
    found: list[Call], expected: list[Call], kind: str, *, has_main_grad: bool = False
) -> None:
    """As often, and with the same gradients. Calls for one parameter come in the order of microbatches.

    Those of a module that several stages have come in the order of the B's.
    """
    assert len(found) == len(expected)
    if kind == "module":
        found, expected = (
            sorted(side, key=lambda each: [tensor.sum().item() for tensor in each.given])
            for side in (found, expected)
        )
    for name in {each.name for each in expected}:
        pairs = [[each for each in side if each.name == name] for side in (found, expected)]
        assert len(pairs[0]) == len(pairs[1]), name
        for one, other in zip(*pairs, strict=True):
            if kind != "any":  # which gradient comes first is not said
                assert_same(one.given, other.given, has_main_grad=has_main_grad)


def assert_same(
    found: list[Tensor | None], expected: list[Tensor | None], *, has_main_grad: bool = False
) -> None:
    """Up to rounding in float64. A `main_grad` is 0 where `.grad` is None."""
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None or (has_main_grad and not one.any())
        else:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
