"""W: the weight gradients that B put off, and adding them to `.grad`.

A parameter that has a `main_grad` (a float32 tensor of its shape, say, beside bf16 weights) gets
its gradients added there, and its `.grad` is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.autograd.graph import Edge, Use
from zbpp.autograd.rules import Packed

Part = tuple[Use, Tensor]  # a use and its dy


class Work(Protocol):
    """What is left to do for one leaf."""

    @property
    def leaf(self) -> Tensor: ...
    def tensors(self) -> Iterator[Tensor]: ...
    def accumulate(self) -> None: ...


class Deferred(NamedTuple):
    """A leaf whose gradient is still to be computed: the sum over its uses."""

    leaf: Tensor
    parts: list[Part]

    def tensors(self) -> Iterator[Tensor]:
        for use, dy in self.parts:
            yield dy
            for held in use.held:
                yield from held.tensors() if isinstance(held, Packed) else (held,)

    def accumulate(self) -> None:
        leaf = self.leaf
        if leaf._backward_hooks or _through_autograd(self.parts):
            _add_to_grad(leaf, _run_hooks(leaf, self._gradient()))
        elif (total := _total(leaf)) is not None:
            _add_parts(total, self.parts, fresh=False)
        else:
            leaf.grad = _sum_of(leaf, self.parts)

    def _gradient(self) -> Tensor:
        """This microbatch's gradient by itself."""
        direct = [part for part in self.parts if part[0].views is not None]
        computed = [part for part in self.parts if part[0].views is None]
        if not computed:
            return _sum_of(self.leaf, direct)
        chained = _through_chains(self.leaf, computed)
        return chained + _sum_of(self.leaf, direct) if direct else chained


def _add_parts(total: Tensor, parts: list[Part], *, fresh: bool) -> None:
    """Add each part to its view of a leaf's gradient."""
    for use, dy in parts:
        target = total
        for view in use.views or ():
            target = view.look(target)
        use.add(target, use.held, dy, fresh)
        fresh = False


def _through_autograd(parts: list[Part]) -> bool:
    return None in [use.views for use, _ in parts]


def _sum_of(leaf: Tensor, parts: list[Part]) -> Tensor:
    """A new gradient in the leaf's layout."""
    whole = all(view.whole for view in parts[0][0].views or ())
    gradient = torch.empty_like(leaf) if whole else torch.zeros_like(leaf)
    _add_parts(gradient, parts, fresh=whole)
    return gradient


def _through_chains(leaf: Tensor, parts: list[Part]) -> Tensor:
    """Sum the parts where their chains begin, then let autograd run each chain once."""
    at_head: dict[Edge, Tensor] = {}
    for use, dy in parts:
        head = use.chain[0]
        fresh = head not in at_head
        if fresh:
            at_head[head] = _like_output(head)
        use.add(at_head[head], use.held, dy, fresh)
    edges = [GradientEdge(*head) for head in at_head]
    (gradient,) = torch.autograd.grad(edges, leaf, list(at_head.values()))
    return gradient


def _like_output(edge: Edge) -> Tensor:
    node: Any = edge[0]
    meta = node._input_metadata[edge[1]]
    return torch.empty(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


class Computed(NamedTuple):
    """A leaf whose gradient B has computed already, running the leaf's tensor hooks."""

    leaf: Tensor
    gradient: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.gradient

    def accumulate(self) -> None:
        _add_to_grad(self.leaf, self.gradient)


class Custom(NamedTuple):
    """What an autograd Function put off by `defer`."""

    leaf: Tensor
    compute: Callable[..., Tensor]
    held: tuple[Tensor, ...]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.held

    def accumulate(self) -> None:
        _add_to_grad(self.leaf, _run_hooks(self.leaf, self.compute(*self.held)))


class WeightGrads:
    """What `backward_input` leaves for later: hold it, then call `accumulate()` once."""

    def __init__(self, work: list[Work]) -> None:
        self._work: list[Work] | None = work

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct storages kept alive for W; 0 afterwards."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for each in self._work or ()
            for tensor in each.tensors()
            for storage in _storages(tensor)
        }
        return sum(storages.values())

    def accumulate(self) -> None:
        """W: add the gradients to each parameter's `.grad` and drop what was held.

        Post-accumulate-grad hooks fire, once per parameter. Raises RuntimeError at a second call.
        """
        if self._work is None:
            raise RuntimeError(
                "accumulate() was called before: these gradients are in .grad already, and what they were "
                "computed from is gone; call backward_input again after another forward"
            )
        work, self._work = self._work, None
        with torch.no_grad():
            for position, each in enumerate(work):
                each.accumulate()
                work[position] = _DONE  # its memory goes at once
                leaf = each.leaf
                if getattr(leaf, "_post_accumulate_grad_hooks", None):
                    _run_post_accumulate_hooks(leaf, rest=work[position + 1 :])


_DONE: Any = None


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor: of its parts, if it is sparse or a subclass made of others (DTensor)."""
    if tensor.is_sparse:
        parts = [tensor._indices(), tensor._values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        yield tensor.untyped_storage()
        return
    for part in parts:
        yield from _storages(part)


def _total(leaf: Tensor) -> Tensor | None:
    """What the gradients of a leaf are summed in, None if there is nothing yet."""
    main: Tensor | None = getattr(leaf, "main_grad", None)
    return leaf.grad if main is None else main


def _add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    total = _total(leaf)
    if total is None:
        # A captured gradient may BE another one, or dy, or what arrived from the next stage, or have
        # stride 0: the first one is copied, in the parameter's layout (a sparse one stays sparse).
        leaf.grad = gradient.clone() if gradient.is_sparse else torch.empty_like(leaf).copy_(gradient)
    elif total.is_sparse and not gradient.is_sparse:
        leaf.grad = gradient + total
    else:
        total.add_(gradient)


def _run_hooks(leaf: Tensor, gradient: Tensor) -> Tensor:
    """A leaf's tensor hooks see, and may replace, the microbatch's gradient."""
    hooks: dict[int, Callable[[Tensor], Tensor | None]] = leaf._backward_hooks or {}
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _run_post_accumulate_hooks(leaf: Tensor, rest: list[Work]) -> None:
    """autograd.grad fires them for nobody, so W does: after the last work for the leaf."""
    if any(each.leaf is leaf for each in rest):
        return
    hooks: dict[int, Callable[[Tensor], None]] = leaf._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):
        hook(leaf)
