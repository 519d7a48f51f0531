"""W: the weight gradients that B put off, and adding them to `.grad`.

A parameter that has a `main_grad` (a float32 tensor of its shape, say, beside bf16 weights) gets
its gradients added there, and its `.grad` is left alone.

W reads tensors that may share memory with others: x with a buffer that the next forward writes
into, dy with a gradient that the caller passed in or got back. They are guarded as autograd guards
its saved tensors: autograd counts the in-place changes of each tensor (`_version`), B remembers the
count of all that W will read, and W raises `ChangedInPlace` if it has grown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.autograd.graph import Edge, Use
from zbpp.autograd.hooks import run_hooks, run_post_accumulate_hooks
from zbpp.autograd.rules import name_of, version_of


class Work(Protocol):
    """What is left to do for one leaf."""

    @property
    def leaf(self) -> Tensor: ...
    def tensors(self) -> Iterator[Tensor]: ...
    def accumulate(self) -> Tensor:
        """Add to the leaf's gradient; returns the leaf."""


class ChangedInPlace(RuntimeError):
    """What W would read is not what B left for it. leaf: whose gradient W was about to add to."""

    def __init__(self, leaf: Tensor, what: str, tensor: Any, remedy: str) -> None:
        shape = f" of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""
        super().__init__(
            f"{what}{shape} was changed in place before W, which needs it as B found it, for the gradient of "
            f"a weight of shape {tuple(leaf.shape)}: {remedy}"
        )
        self.leaf = leaf


_CLONE_GRADIENT = (
    "clone a gradient before changing it, be it one that was passed to B or one that B returned "
    "(grad = grad * 2, not grad.mul_(2))"
)


class Part(NamedTuple):
    """One use of a leaf, with its dy; by itself the work for a leaf that has no other."""

    use: Use
    dy: Tensor
    version: int  # of dy and all that the use holds

    @property
    def leaf(self) -> Tensor:
        return self.use.leaf

    def tensors(self) -> Iterator[Tensor]:
        yield self.dy
        yield from self.use.tensors()

    def check(self) -> None:
        """Raise ChangedInPlace if anything was changed since B."""
        if version_of(self.use.held) + self.dy._version != self.version:
            raise self._changed()

    def _changed(self) -> ChangedInPlace:
        leaf, held, node = self.use.leaf, self.use.held, name_of(self.use.rule)
        if version_of(held) == self.use.version:
            return ChangedInPlace(leaf, f"dy, the gradient of {node}'s output,", self.dy, _CLONE_GRADIENT)
        return ChangedInPlace(
            leaf,
            f"the input that {node} saved",
            held[0],
            "clone it before the layer, or let each forward write into new memory, not with out= or an "
            "in-place operation into a tensor that is kept",
        )

    def add_to(self, total: Tensor, fresh: bool) -> None:
        """To its view of the leaf's gradient; if `fresh`, that is uninitialised memory."""
        (_, held, add, _, views, _, _), dy, _ = self
        self.check()
        for view in views or ():
            total = view.look(total)
        add(total, held, dy, fresh)

    def accumulate(self) -> Tensor:
        (leaf, held, add, _, views, _, _), dy, version = self
        now = dy._version
        for each in held:
            now += each._version
        if now != version:
            raise self._changed()
        total = total_of(leaf)
        if total is None or views or leaf._backward_hooks:
            _accumulate(leaf, [self])
        else:  # nearly always, and in a hurry: add_to without views
            add(total, held, dy, False)
        return leaf


class Sum(NamedTuple):
    """A leaf with several uses, or one through a chain that computes."""

    leaf: Tensor
    parts: list[Part]

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.tensors()

    def accumulate(self) -> Tensor:
        leaf, parts = self
        if any(part.use.views is None for part in parts):
            add_to_grad(leaf, _through_chains(leaf, parts))
        else:
            _accumulate(leaf, parts)
        return leaf


def summed(parts: list[Part]) -> list[Work]:
    """The work for each leaf, whose parts stand side by side."""
    groups = [list(group) for _, group in groupby(parts, key=lambda part: id(part.leaf))]
    return [Sum(group[0].leaf, group) for group in groups]


def _accumulate(leaf: Tensor, parts: list[Part]) -> None:
    if leaf._backward_hooks:
        add_to_grad(leaf, run_hooks(leaf, _sum_of(leaf, parts)))
    elif (total := total_of(leaf)) is not None:
        for part in parts:
            part.add_to(total, False)
    else:
        leaf.grad = _sum_of(leaf, parts)


def _sum_of(leaf: Tensor, parts: list[Part]) -> Tensor:
    """A new gradient in the leaf's layout."""
    whole = all(view.whole for view in parts[0].use.views or ())
    gradient = _new_gradient(leaf) if whole else _new_gradient(leaf).zero_()
    for part in parts:
        part.add_to(gradient, whole)
        whole = False
    return gradient


def _through_chains(leaf: Tensor, parts: list[Part]) -> Tensor:
    """Sum the parts where their chains begin, then let autograd run each chain once, and the leaf's hooks."""
    at_head: dict[Edge, Tensor] = {}
    for part in parts:
        use, dy, _ = part
        if use.views is not None:
            continue
        part.check()
        head = use.chain[0]
        fresh = head not in at_head
        if fresh:
            at_head[head] = _like_output(head)
        use.add(at_head[head], use.held, dy, fresh)
    starts: list[Any] = [GradientEdge(*head) for head in at_head]
    gradients = list(at_head.values())
    direct = [part for part in parts if part.use.views is not None]
    if direct:  # starts at the leaf itself
        starts.append(leaf)
        gradients.append(_sum_of(leaf, direct))
    (gradient,) = torch.autograd.grad(starts, leaf, gradients)
    return gradient


def _like_output(edge: Edge) -> Tensor:
    node: Any = edge[0]
    meta = node._input_metadata[edge[1]]
    return torch.empty(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


class Computed(NamedTuple):
    """A leaf whose gradient B has computed already, running the leaf's tensor hooks."""

    leaf: Tensor
    gradient: Tensor
    version: int

    def tensors(self) -> Iterator[Tensor]:
        yield self.gradient

    def accumulate(self) -> Tensor:
        leaf, gradient, version = self
        if gradient._version != version:
            raise ChangedInPlace(leaf, "the gradient that B computed,", gradient, _CLONE_GRADIENT)
        add_to_grad(leaf, gradient)
        return leaf


class Custom(NamedTuple):
    """What an autograd Function put off by `defer`."""

    leaf: Tensor
    compute: Callable[..., Tensor]
    held: tuple[Tensor, ...]
    version: int

    def tensors(self) -> Iterator[Tensor]:
        yield from self.held

    def accumulate(self) -> Tensor:
        if version_of(self.held) != self.version:
            raise ChangedInPlace(
                self.leaf,
                "a tensor that a Function passed to defer",
                None,
                "clone it before it is changed, or pass a clone to defer",
            )
        add_to_grad(self.leaf, run_hooks(self.leaf, self.compute(*self.held)))
        return self.leaf


class WeightGrads:
    """What `backward_input` leaves for later: hold it, then call `accumulate()` once."""

    def __init__(self, work: list[Work]) -> None:
        self._work: list[Work] | None = work

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct storages kept alive for W, but for the leaves' own; 0 afterwards."""
        work = self._work or ()
        storages = {
            storage.data_ptr(): storage.nbytes()
            for each in work
            for tensor in each.tensors()
            for storage in _storages(tensor)
        }
        own = {storage.data_ptr() for each in work for storage in _storages(each.leaf)}
        return sum(count for start, count in storages.items() if start not in own)

    def accumulate(self) -> None:
        """W: add the gradients to each parameter's `.grad` and drop what was held.

        Post-accumulate-grad hooks fire, once per parameter. Raises RuntimeError at a second call, and
        ChangedInPlace, a RuntimeError, if what W reads was changed in place since B.
        """
        if self._work is None:
            raise RuntimeError(
                "accumulate() was called before: these gradients are in .grad already, and what they were "
                "computed from is gone; call backward_input again after another forward"
            )
        work, self._work = self._work, None
        work.reverse()
        last: dict[int, int] = {}
        with torch.set_grad_enabled(False):  # no_grad() takes twice as long
            while work:
                leaf = work.pop().accumulate()  # what was held goes at once, before any hook
                if leaf._post_accumulate_grad_hooks:
                    # autograd.grad fires them for nobody, so W does: after the last work for the leaf.
                    last = last or {id(each.leaf): left for left, each in reversed([*enumerate(work)])}
                    if last.get(id(leaf), len(work)) >= len(work):
                        run_post_accumulate_hooks(leaf)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor: of its parts, if it is sparse or a subclass made of others (DTensor)."""
    if tensor.is_sparse:
        parts = [tensor._indices(), tensor._values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in inner if isinstance(part, Tensor)]  # DTensor names its mesh, too
    else:
        yield tensor.untyped_storage()
        return
    for part in parts:
        yield from _storages(part)


def total_of(leaf: Tensor) -> Tensor | None:
    """What the gradients of a leaf are summed in, None if there is nothing yet."""
    main: Tensor | None = getattr(leaf, "main_grad", None)
    return leaf.grad if main is None else main


def add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    total = total_of(leaf)
    if total is None:
        # A captured gradient may BE another one, or dy, or what arrived from the next stage, or have
        # stride 0: the first one is copied, in the parameter's layout (a sparse one stays sparse).
        leaf.grad = gradient.clone() if gradient.is_sparse else _new_gradient(leaf).copy_(gradient)
    elif total.is_sparse and not gradient.is_sparse:
        leaf.grad = gradient + total
    else:
        total.add_(gradient)


def grad_dtype(leaf: Tensor) -> torch.dtype:
    """What a leaf's `.grad` is to be."""
    return getattr(leaf, "grad_dtype", None) or leaf.dtype


def _new_gradient(leaf: Tensor) -> Tensor:
    """Uninitialised, in the leaf's layout."""
    return torch.empty_like(leaf, dtype=grad_dtype(leaf))
