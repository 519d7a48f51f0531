"""Cutting the arguments of one call of the pipeline into microbatches, by views along dim 0.

If the timetable has slices, each microbatch is then cut along time, which is dim 1: every tensor whose dim 1
is as long as the sequence. A piece is a unit's. Other tensors and BlockMasks, and what is marked by
`replicate`, go whole to each slice.

Tensors are found wherever torch's pytree looks: in tuples, lists, dicts, named tuples, and in classes that
were registered with it. The marks `replicate` and `per_microbatch` work inside them, too. FlexAttention's
BlockMask is split along its batch dimension; a BlockMask of one row holds for all rows, as in flex_attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import (
    KeyPath,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
    tree_unflatten,
)

from zbpp.autograd.arguments import edge_of
from zbpp.autograd.graph import leaves_below
from zbpp.autograd.leaf_grad import engine_adds_to_main_grad
from zbpp.error_text import kind_of
from zbpp.runtime.call.marks import PLAIN, PerMicrobatch, Replicated, is_marked
from zbpp.runtime.call.sequence_lengths import SequenceLengths, sequence_length


def into_microbatches(
    name: str, value: Any, num_microbatches: int, slice_bounds: Sequence[int] = ()
) -> list[Any]:
    """The pieces of one value, one per microbatch or slice of it, as `Cutter.cut` makes them."""
    cutter = Cutter(num_microbatches, slice_bounds)
    pieces = cutter.cut(name, value)
    cutter.refuse_rows_of_lists()
    return pieces


class Cutter:
    """Cuts the values of one call into units, and runs the backward of the caller's graph.

    A unit is a microbatch; with slice_bounds, a slice of one. slice_bounds: the positions in the sequence at
    which the slices begin, and its end; (): sequences are not cut.

    A piece that requires grad is replaced by a new leaf: B ends there and adds its gradient to the leaf's
    `.grad`. `backward` passes those sums on to the caller's tensors. So the caller's graph is traversed once,
    however many microbatches there are.
    """

    def __init__(self, num_microbatches: int, slice_bounds: Sequence[int] = ()) -> None:
        self.num_microbatches = num_microbatches
        self.sequences = SequenceLengths(num_microbatches, slice_bounds)
        self.num_slices = self.sequences.num_slices
        self.num_units = num_microbatches * self.num_slices
        self.order: tuple[int, ...] | None = None  # in which microbatches go, where a value says it
        self.is_even = True  # whether the microbatches of all values were cut here, and so have equal shapes
        self.rows: int | None = None  # dim 0 of every tensor that is split; None before the first one
        self._first = ""  # the name of the first tensor that was split
        self._lists: list[tuple[str, int]] = []  # (name, length) of the lists among the values
        self._leaves: list[tuple[Tensor, Tensor]] = []  # (tensor of the caller's graph, its leaf)

    def cut(self, name: str, value: Any) -> list[Any]:
        """One piece per unit: views of a tensor, or copies of its slices; a value without tensors goes whole.

        A tensor or BlockMask inside of another value is split, too: dim 0 of every tensor is the batch's
        rows, unless it is marked.

        Raises ValueError, which begins with `name`, if dim 0 is not a multiple of num_microbatches, or
        differs from an earlier value's; if a `per_microbatch` has another number of values; and where tensors
        can't be reached.
        """
        if isinstance(value, Tensor):
            return list(map(self._of_one_unit, self._in_slices(self._pieces(name, value))))
        if isinstance(value, BlockMask):
            return [each for mask in self._masks(name, value) for each in [mask] * self.num_slices]
        if isinstance(value, PerMicrobatch):
            self._take_order(name, value)
            return [tree_map(self._leaf, each) for each in self._in_slices(value.values)]
        if isinstance(value, Replicated):
            return [tree_map(self._leaf, value.value)] * self.num_units
        if isinstance(value, PLAIN):
            return [value] * self.num_units
        return self._nested(name, value)

    def cut_arguments(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Per unit, its positional arguments: () where there are none."""
        pieces = [self.cut(f"argument {i}", value) for i, value in enumerate(values)]
        return [tuple([each[i] for each in pieces]) for i in range(self.num_units)]

    def cut_keywords(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Per unit, its keyword arguments."""
        pieces = {name: self.cut(name, value) for name, value in values.items()}
        return [{name: each[i] for name, each in pieces.items()} for i in range(self.num_units)]

    def refuse_rows_of_lists(self, others: Any = ()) -> None:
        """Raise ValueError for a list as long as the batch among the values that were cut.

        Every microbatch would get a value for each row. others: values of the call that this rank doesn't
        cut; their tensors say how long the batch is, too. Where no tensor does, any list that would split
        may be as long.
        """
        rows = self.rows or next(map(len, filter(_has_rows, tree_leaves(others, is_leaf=is_cut_whole))), None)
        batch = "no tensor says how many rows the batch has" if rows is None else f"the batch has {rows} rows"
        for name, length in self._lists:
            if length == rows or (rows is None and length and length % self.num_microbatches == 0):
                raise ValueError(
                    f"{name} is a list of {length} values, and {batch}. If the list has one value per row, "
                    "write zbpp.per_microbatch([...]) with the values of each microbatch. If each of its "
                    f"tensors has all rows, write tuple({name}); zbpp.replicate({name}) gives all of it to "
                    "every microbatch"
                )

    @property
    def has_graph(self) -> bool:
        """Whether the caller's graph gets gradients: `backward` runs through it."""
        return bool(self._leaves)

    def backward(self) -> None:
        """Run the backward of the caller's graph, from the gradients that the leaves have collected.

        As W does, it adds the gradient of a parameter with a `main_grad` there.
        """
        reached = [(tensor, leaf.grad) for tensor, leaf in self._leaves if leaf.grad is not None]
        if reached:
            tensors, grads = zip(*reached, strict=True)
            with engine_adds_to_main_grad(leaves_below(map(edge_of, tensors))):
                torch.autograd.backward(tensors, grads)

    def _take_order(self, name: str, value: PerMicrobatch) -> None:
        """Raises ValueError for another number of values, and for another order than an earlier one."""
        number, expected = len(value.values), self.num_microbatches
        if number != expected:
            instead = (
                f"plan for {number} microbatches, or put several values into one"
                if number > expected
                else "write None for a microbatch that is empty"
            )
            raise ValueError(f"{name} has {number} values, num_microbatches={expected}: {instead}")
        if value.order is not None and self.order not in (None, value.order):
            raise ValueError(f"{name} has another order than an argument before it: give it once")
        self.order, self.is_even = value.order or self.order, False

    def _nested(self, name: str, value: Any) -> list[Any]:
        if self.num_microbatches > 1:
            self._lists += _lists_in(name, value)
        leaves, spec = tree_flatten_with_path(value, is_leaf=is_cut_whole)
        if not any(isinstance(leaf, Tensor) or is_cut_whole(leaf) for _, leaf in leaves):
            for path, leaf in leaves:
                _refuse_rows_of_an_array(name + keystr(path), leaf)
                _refuse_hidden_tensors(name + keystr(path), leaf)
            return [value] * self.num_units
        pieces = [self.cut(name + keystr(path), leaf) for path, leaf in leaves]
        return [tree_unflatten([each[i] for each in pieces], spec) for i in range(self.num_units)]

    def _in_slices(self, values: Sequence[Any]) -> Iterator[Any]:
        """What each unit gets, given the value of each microbatch.

        A tensor is a sequence if its dimension 1 is as long as the sequence in each microbatch.
        """
        if not self.sequences.bounds:
            yield from values
            return
        whole = _not_sequences(values, self.sequences.of_all())

        def part(path: KeyPath, each: Any, start: int, end: int) -> Any:
            is_cut = isinstance(each, Tensor) and path not in whole and sequence_length(each) is not None
            # Contiguous: a microbatch is, and a loss may ask for target.view(-1).
            return each[:, start:end].contiguous() if is_cut else each

        for microbatch, value in enumerate(values):
            for start, end in pairwise(self.sequences.bounds_of(microbatch)):
                yield tree_map_with_path(partial(part, start=start, end=end), value)

    def _pieces(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind, dense = ("nested", "") if tensor.is_nested else ("sparse", f"{name}.to_dense() or ")
            raise ValueError(
                f"{name} is a {kind} tensor, which is not split into microbatches: pass {dense}"
                f"zbpp.per_microbatch([...]) with one value for each, or zbpp.replicate({name})"
            )
        if tensor.dim() == 0:
            raise ValueError(
                f"{name} is a tensor without dimensions: pass a number, or zbpp.replicate({name})"
            )
        return tensor.split(self._size(name, len(tensor), f"zbpp.replicate({name}) gives all to each"))

    def _masks(self, name: str, mask: BlockMask) -> list[BlockMask]:
        rows = mask.shape[0]
        if rows == 1:
            return [mask] * self.num_microbatches
        size = self._size(name, rows, "make a BlockMask with B=None if it holds for every row")
        return [_rows_of(mask, first, size) for first in range(0, rows, size)]

    def _size(self, name: str, rows: int, instead: str) -> int:
        """How many rows a microbatch has. Raises ValueError, with what to write instead."""
        if rows % self.num_microbatches or not rows:
            raise ValueError(
                f"{name} has {rows} rows, which don't split into num_microbatches={self.num_microbatches}; "
                f"nearest that do: {_nearest(rows, self.num_microbatches)}; or {instead}"
            )
        if self.rows is None:
            self.rows, self._first = rows, name
        elif rows != self.rows:
            raise ValueError(
                f"{name} has {rows} rows, {self._first} has {self.rows}: what is split along dim 0 is one "
                f"batch; {instead}"
            )
        return rows // self.num_microbatches

    def _of_one_unit(self, piece: Tensor) -> Tensor:
        """The piece with its own count of in-place changes, since a stage may change its input in place.

        Views of one batch share one count: a change of one piece would look to autograd like a change of
        what F of another unit has saved.
        """
        leaf: Tensor = self._leaf(piece)
        return leaf if leaf.requires_grad else leaf.data

    def _leaf(self, value: Any) -> Any:
        """A new leaf in place of a tensor of the caller's graph; anything else as it is."""
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        leaf = value.detach().requires_grad_()
        self._leaves.append((value, leaf))
        return leaf


def _not_sequences(values: Sequence[Any], lengths: Sequence[int]) -> set[KeyPath]:
    """Where the values have a tensor whose dimension 1 is not as long as the sequence in each microbatch."""
    return {
        path
        for whole, length in zip(values, lengths, strict=True)
        for path, each in tree_flatten_with_path(whole)[0]
        if isinstance(each, Tensor) and each.numel() and length and sequence_length(each) != length
    }


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.dim() > 0


def is_cut_whole(value: Any) -> bool:
    """Whether a value with tensors is cut as one. Some libraries register BlockMask with pytree."""
    return isinstance(value, BlockMask) or is_marked(value)


def _rows_of(mask: BlockMask, first: int, number: int) -> BlockMask:
    """`number` rows of the batch's mask, from `first` on; its mask_mod counts rows from there."""
    # A tensor: torch.compile would make a graph for each value of a Python int.
    offset = torch.full((), first, device=mask.kv_num_blocks.device)
    rows = mask[first : first + number]
    rows.mask_mod = lambda b, h, q, kv: mask.mask_mod(b + offset, h, q, kv)
    return rows


def _refuse_rows_of_an_array(name: str, value: Any) -> None:
    """Raise ValueError for a NumPy array or similar: every microbatch would get all its rows."""
    if hasattr(value, "__array__") and hasattr(value, "ndim") and value.ndim:
        raise ValueError(
            f"{name} is {kind_of(value)}, which is not split into microbatches: write "
            f"torch.as_tensor({name}); zbpp.replicate({name}) gives all of it to every microbatch"
        )


def _lists_in(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """(name, length) of each list without marks in a value, the value itself included."""
    if type(value) is list and not any(map(is_marked, value)):
        yield name, len(value)

    def is_leaf(each: Any) -> bool:
        return each is not value and (is_cut_whole(each) or type(each) is list)

    for path, leaf in tree_flatten_with_path(value, is_leaf=is_leaf)[0]:
        if type(leaf) is list:
            yield from _lists_in(name + keystr(path), leaf)


def _refuse_hidden_tensors(name: str, value: Any) -> None:
    """Raise ValueError for an object with tensors that pytree doesn't see: none of them would be split."""
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (tuple, list, set, frozenset)):
        inside = list(value)
    else:
        inside = [] if isinstance(value, nn.Module) else list(getattr(value, "__dict__", {}).values())
    if any(isinstance(each, Tensor) for each in tree_leaves(inside)):
        kind = type(value).__name__
        raise ValueError(
            f"{name} is a {kind}, which holds tensors that torch's pytree doesn't find: pass them in a tuple "
            f"or a dict, register {kind} (torch.utils._pytree.register_dataclass), or write "
            f"zbpp.per_microbatch([...]) with one value for each; zbpp.replicate({name}) gives all to each"
        )


def _nearest(batch: int, parts: int) -> str:
    below = batch // parts * parts
    return f"{below}, {below + parts}" if below else str(parts)
