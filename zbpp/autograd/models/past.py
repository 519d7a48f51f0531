"""Keys and values of earlier slices, for attention over a sequence that comes in slices.

    F of slice 0, 1, ..., S - 1    attention of slice k reads the keys and values of slices 0 to k
    B of slice S - 1, ..., 1, 0    B of slice k adds to the gradients of the keys and values of slices < k

A Past belongs to one microbatch on one stage. It has one buffer per use (the keys of a layer, the values of a
layer), as long as the whole sequence. F of a slice writes its part, and attention gets a view from the
sequence's beginning to the slice's end: nothing is concatenated. The graph of a slice begins at its own keys
and values, so B of a slice never enters the graph of another slice.

B of slice k receives the gradient of the whole view. The part that belongs to earlier slices is added to
their sums. The slice's own part, plus the sum that later slices have left for it, goes on into the slice's
graph. So B's descend in slices, and each B is one ordinary backward pass with the same roots, inputs and
sites as without slices: own keys and values always get a gradient, since the slice's attention reads them.

A recompute (checkpoint, torch's own too) calls `whole` once more. It gets the same view, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Past:
    """What the slices of one microbatch share on one stage.

    bounds: where each slice begins, and the sequence's end: slice k has tokens [bounds[k], bounds[k + 1]).
    The buffers live until B of slice 0 has run, or as long as the Past where no B runs.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self._buffers: dict[Hashable, _Buffer] = {}

    @property
    def num_slices(self) -> int:
        return len(self.bounds) - 1

    @property
    def held_bytes(self) -> int:
        """The bytes of keys and values, and of the sums of their gradients."""
        held = [each for buffer in self._buffers.values() for each in (buffer.values, buffer.grads)]
        return sum(each.nbytes for each in held if each is not None)

    def at(self, index: int) -> SequenceSlice:
        """Slice `index`: an argument of the stage's forward."""
        return SequenceSlice(self, index)


class SequenceSlice:
    """One slice of a sequence: tokens [start, end), as the forward of a stage gets them."""

    def __init__(self, past: Past, index: int) -> None:
        self.past, self.index, self.num_slices = past, index, past.num_slices
        self.start, self.end = past.bounds[index], past.bounds[index + 1]

    def first(self, window: int | None = None) -> int:
        """The first position that a token of the slice sees; window: as in `whole`."""
        return 0 if window is None else max(0, self.start - window + 1)

    def whole(self, use: Hashable, own: Tensor, window: int | None = None) -> Tensor:
        """[..., time, d] of this slice -> [..., end - first(window), d], of all tokens that it may see.

        use: names the call among the calls of one forward, such as (layer, "key"); the same name in every
        slice. window: how many tokens a token sees, itself included; None: all before it.
        The result is read only, and its gradient reaches the earlier slices in their B's. It is a view of
        memory that later slices leave unchanged.
        Raises ValueError for a tensor of another length than the slice's, for a name that one forward uses
        twice, and if an earlier slice has not used the name. In backward, RuntimeError if B's do not descend.
        Both raise ValueError if the result of an earlier slice was changed in place.
        """
        if torch.compiler.is_compiling():
            from zbpp.autograd.compiled.dynamo import run_eager

            return run_eager(_whole, self, use, own, window)
        return _whole(self, use, own, window)


def _whole(place: SequenceSlice, use: Hashable, own: Tensor, window: int | None) -> Tensor:
    """`SequenceSlice.whole`. No graph contains it: it reads what other forwards have written."""
    if own.shape[-2] != place.end - place.start:
        raise ValueError(
            f"slice {place.index} has tokens {place.start} to {place.end}, and {_text(use)} got "
            f"{own.shape[-2]} of them in a tensor of shape {tuple(own.shape)}: give [..., time, d]"
        )
    buffer = place.past._buffers.get(use)
    if buffer is None:
        buffer = place.past._buffers[use] = _Buffer(use, own, place.past.bounds)
    buffer.refuse_changes()
    if not _is_recompute():
        buffer.write(own, place)
    return _WithPast.apply(own, buffer, place, place.first(window))  # type: ignore[no-untyped-call]  # torch's


def _is_recompute() -> bool:
    """Whether this forward runs inside a backward pass, as torch's checkpoint asks, too."""
    return torch._C._current_graph_task_id() != -1


class _Buffer:
    """values: of all tokens so far. grads: sums for slices whose B has not run; None before the first one.

    given: the view of the values that attention got last.
    """

    def __init__(self, use: Hashable, like: Tensor, bounds: Sequence[int]) -> None:
        self.use = use
        shape = (*like.shape[:-2], bounds[-1], like.shape[-1])
        self.values: Tensor | None = like.detach().new_empty(shape)
        self.grads: Tensor | None = None
        self.given: Tensor | None = None
        self.num_written, self.next_backward = 0, len(bounds) - 2

    def write(self, own: Tensor, place: SequenceSlice) -> None:
        if self.num_written > place.index:
            raise ValueError(
                f"slice {place.index} gives {_text(self.use)} twice in one forward: name each call "
                "differently"
            )
        if self.num_written < place.index:
            raise ValueError(
                f"F of slice {place.index} gives {_text(self.use)}, and F of slice {self.num_written} has "
                "not: F's of a sequence ascend in slices, and each makes the same calls"
            )
        assert self.values is not None
        with torch.no_grad():
            _part(self.values, place.start, place.end).copy_(own)
        self.num_written += 1

    def read(self, first: int, end: int) -> Tensor:
        """Tokens [first, end), in a view with a count of its own of in-place changes.

        Later slices write behind its end: to autograd this is no change of what attention saves.
        """
        assert self.values is not None
        view = _part(self.values, first, end).data
        if not view.is_inference():
            self.given = view.detach()  # shares the count of changes
        return view

    def refuse_changes(self) -> None:
        """Raise ValueError if a forward has written into the view that it got: other slices read it, too."""
        if self.given is not None and self.given._version:
            raise ValueError(
                f"a forward has changed the whole {_text(self.use)} in place, which other slices read, too: "
                "use an operation that makes a new tensor, such as x * 2 in place of x.mul_(2)"
            )

    def drop(self) -> None:
        self.values = self.grads = self.given = None

    def add(self, grad: Tensor, first: int, end: int) -> None:
        """Add a gradient of tokens [first, end): in float32 at least, since it is one of many terms."""
        if self.grads is None:
            shape = (*grad.shape[:-2], end, grad.shape[-1])
            self.grads = grad.new_zeros(shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        _part(self.grads, first, end).add_(grad)


def _text(use: Hashable) -> str:
    """(layer, "key") is "key of Attention"."""
    parts = use if isinstance(use, tuple) else (use,)
    names = [type(each).__name__ if isinstance(each, nn.Module) else str(each) for each in parts]
    return " of ".join(reversed(names))


def _part(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor.narrow(-2, start, end - start)


class _WithPast(torch.autograd.Function):
    """own [..., time, d] -> the buffer's tokens [first, end)."""

    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, own: Tensor, buffer: _Buffer, place: SequenceSlice, first: int) -> Tensor:
        ctx.buffer, ctx.index, ctx.first = buffer, place.index, first
        ctx.start, ctx.end = place.start, place.end
        return buffer.read(first, place.end)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        buffer, first, start, end = ctx.buffer, ctx.first, ctx.start, ctx.end
        buffer.refuse_changes()
        if buffer.next_backward != ctx.index:
            raise RuntimeError(
                f"B of slice {ctx.index} runs where B of slice {buffer.next_backward} is next: B's of a "
                "sequence descend in slices, each runs once, and each gives its keys and values a gradient"
            )
        buffer.next_backward -= 1
        own = _part(grad, start - first, end - first)
        if buffer.grads is not None:
            own = (own + _part(buffer.grads, start, end)).to(grad.dtype)
        else:
            own = own.clone()  # W may hold it: a view would hold the gradient of all tokens
        if start > first:
            buffer.add(_part(grad, 0, start - first), first, start)
        if ctx.index == 0:
            buffer.drop()
        return own, None, None, None
