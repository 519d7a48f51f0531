"""W: the weight gradients that B put off, and adding them to `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.autograd.graph import Edge, kind
from zbpp.autograd.rules import Capture

# Chains of these nodes are views: W accumulates into the same view of `.grad`.
_VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "TBackward0": lambda node, tensor: tensor.t(),
}


class Part(NamedTuple):
    """One site's share of a leaf's gradient."""

    capture: Capture
    chain: tuple[Edge, ...]
    dy: Tensor


class Deferred(NamedTuple):
    """A leaf whose gradient is still to be computed from its parts."""

    leaf: Tensor
    parts: list[Part]

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.capture.held
            yield part.dy

    def accumulate(self) -> None:
        if self.leaf._backward_hooks or not all(_is_view(part.chain) for part in self.parts):
            _add_to_grad(self.leaf, _run_hooks(self.leaf, self._gradient()))
        else:
            self._add_in_place()

    def _add_in_place(self) -> None:
        fresh = self.leaf.grad is None
        if self.leaf.grad is None:
            self.leaf.grad = torch.empty_like(self.leaf)
        for part in self.parts:
            target = _through(part.chain, self.leaf.grad)
            part.capture.add(target, part.capture.held, part.dy, fresh)
            fresh = False

    def _gradient(self) -> Tensor:
        """This microbatch's gradient by itself: summed at the heads of the chains, then through them."""
        at_head: dict[Edge | None, Tensor] = {}
        for part in self.parts:
            head = part.chain[0] if part.chain else None
            fresh = head not in at_head
            if fresh:
                at_head[head] = torch.empty_like(self.leaf) if head is None else _like_output(head)
            part.capture.add(at_head[head], part.capture.held, part.dy, fresh)
        direct = at_head.pop(None, None)
        if not at_head:
            return direct if direct is not None else torch.zeros_like(self.leaf)
        edges = [GradientEdge(*head) for head in at_head if head is not None]
        (chained,) = torch.autograd.grad(edges, self.leaf, list(at_head.values()))
        return chained if direct is None else chained + direct


class Computed(NamedTuple):
    """A leaf whose gradient B has computed already."""

    leaf: Tensor
    gradient: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.gradient

    def accumulate(self) -> None:
        _add_to_grad(self.leaf, self.gradient)


class WeightGrads:
    """What `backward_input` leaves for later: hold it, then call `accumulate()` once."""

    def __init__(self, work: list[Deferred | Computed]) -> None:
        self._work: list[Deferred | Computed] | None = work[::-1]

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct storages kept alive for W; 0 afterwards."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for each in self._work or ()
            for storage in (tensor.untyped_storage() for tensor in each.tensors())
        }
        return sum(storages.values())

    def accumulate(self) -> None:
        """W: add the gradients to each parameter's `.grad` and drop what was held.

        Post-accumulate-grad hooks fire, once per parameter. Raises RuntimeError at a second call.
        """
        if self._work is None:
            raise RuntimeError("accumulate() was called before: these gradients are already in .grad")
        work, self._work = self._work, None
        with torch.no_grad():
            while work:
                each = work.pop()  # its memory goes as soon as it is done
                each.accumulate()
                _run_post_accumulate_hooks(each.leaf)


def _is_view(chain: tuple[Edge, ...]) -> bool:
    return all(kind(node) in _VIEWS for node, _ in chain)


def _through(chain: tuple[Edge, ...], tensor: Tensor) -> Tensor:
    for node, _ in reversed(chain):
        tensor = _VIEWS[kind(node)](node, tensor)
    return tensor


def _like_output(edge: Edge) -> Tensor:
    node: Any = edge[0]
    meta = node._input_metadata[edge[1]]
    return torch.empty(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def _add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    # A captured gradient may BE another one, or dy, or what arrived from the next stage, or have
    # stride 0: the first one is copied, in the parameter's layout.
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)
    else:
        leaf.grad.add_(gradient)


def _run_hooks(leaf: Tensor, gradient: Tensor) -> Tensor:
    """A leaf's tensor hooks see, and may replace, the microbatch's gradient."""
    hooks: dict[int, Callable[[Tensor], Tensor | None]] = leaf._backward_hooks or {}
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _run_post_accumulate_hooks(leaf: Tensor) -> None:
    # autograd.grad fires them for nobody, so W does.
    hooks: dict[int, Callable[[Tensor], None]] = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        hook(leaf)
