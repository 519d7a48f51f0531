"""Cutting what one call of the pipeline is given into microbatches, by views along dim 0.

Tensors are found wherever torch's pytree looks: in tuples, lists, dicts, named tuples, and in classes
that were registered with it. The marks `replicate` and `per_microbatch` work there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

_PLAIN = (int, float, complex, str, bytes, type(None))  # bool is an int


class Replicated:
    """A value that every microbatch gets whole; made by `replicate`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def replicate(value: Any) -> Replicated:
    """Mark a tensor that `Pipeline.step` is given, or what holds tensors, as not to be split along dim 0."""
    if isinstance(value, _PLAIN):
        raise TypeError(f"replicate() takes a tensor, not {type(value).__name__}: other values need no mark")
    return Replicated(value)


class PerMicrobatch:
    """One value for each microbatch; made by `per_microbatch`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


def per_microbatch(values: Sequence[Any]) -> PerMicrobatch:
    """Mark an argument of `Pipeline.step` as cut already: `values[i]` goes to microbatch i.

    Tensors among them may differ in shape; what then differs between stages needs dynamic_shapes. Each
    microbatch counts alike in the mean, whatever its size.
    """
    return PerMicrobatch(values)


def split(name: str, value: Any, num_microbatches: int) -> list[Any]:
    """`num_microbatches` pieces of one value, as `Cutter.cut` makes them."""
    return Cutter(num_microbatches).cut(name, value)


class Cutter:
    """Cuts the values of one call, and leads gradients back to where they came from.

    A piece that requires grad is a leaf of its own: B ends there, and sums up what it finds in the leaf's
    `.grad`. `backward` hands the sums on. So the caller's graph is gone through once, however many
    microbatches there are.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.rows: int | None = None  # of all tensors together; None before the first
        self._num, self._first = num_microbatches, ""
        self._leaves: list[tuple[Tensor, Tensor]] = []  # (what the caller gave, the leaf in its place)

    def cut(self, name: str, value: Any) -> list[Any]:
        """One piece per microbatch: a tensor's are views; a value without tensors is given to each as it is.

        Raises ValueError, with the name of what it is about, if dim 0 doesn't divide or is not that of an
        earlier value, for another number of values per microbatch, and where tensors can't be reached.
        """
        if isinstance(value, Tensor):
            return list(map(self._of_one_microbatch, self._pieces(name, value)))
        if isinstance(value, PerMicrobatch):
            if len(value.values) != self._num:
                raise ValueError(f"{name} has {len(value.values)} values, num_microbatches={self._num}")
            return [tree_map(self._leaf, each) for each in value.values]
        if isinstance(value, Replicated):
            return [tree_map(self._leaf, value.value)] * self._num
        if isinstance(value, _PLAIN):
            return [value] * self._num
        return self._nested(name, value)

    def cut_keywords(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Per microbatch, its keyword arguments."""
        pieces = {name: self.cut(name, value) for name, value in values.items()}
        return [{name: each[i] for name, each in pieces.items()} for i in range(self._num)]

    def backward(self) -> None:
        """Run the backward of the caller's graph, with the sums over microbatches."""
        reached = [(tensor, leaf.grad) for tensor, leaf in self._leaves if leaf.grad is not None]
        if reached:
            torch.autograd.backward([tensor for tensor, _ in reached], [grad for _, grad in reached])

    def _nested(self, name: str, value: Any) -> list[Any]:
        leaves, spec = tree_flatten_with_path(value, is_leaf=_is_marked)
        if not any(isinstance(leaf, (Tensor, Replicated, PerMicrobatch)) for _, leaf in leaves):
            for path, leaf in leaves:
                _refuse_rows_of_an_array(name + keystr(path), leaf)
                _refuse_hidden_tensors(name + keystr(path), leaf)
            return [value] * self._num
        pieces = [self.cut(name + keystr(path), leaf) for path, leaf in leaves]
        return [tree_unflatten([each[i] for each in pieces], spec) for i in range(self._num)]

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
        rows = len(tensor)
        if rows % self._num or not rows:
            raise ValueError(
                f"{name} has {rows} rows, which don't split into num_microbatches={self._num}; "
                f"nearest that do: {_nearest(rows, self._num)}; or zbpp.replicate({name})"
            )
        if self.rows is None:
            self.rows, self._first = rows, name
        elif rows != self.rows:
            raise ValueError(
                f"{name} has {rows} rows, {self._first} has {self.rows}: what is split along dim 0 is one "
                f"batch; zbpp.replicate({name}) gives all its rows to every microbatch"
            )
        return tensor.split(rows // self._num)

    def _of_one_microbatch(self, piece: Tensor) -> Tensor:
        """A piece with a count of changes in place of its own, since a stage may change its input.

        The views of one batch share a count; with it, a change of one would spoil what F of another saved.
        """
        leaf: Tensor = self._leaf(piece)
        return leaf if leaf.requires_grad else leaf.data

    def _leaf(self, value: Any) -> Any:
        """What stands for a tensor of the caller's graph; anything else as it is."""
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        leaf = value.detach().requires_grad_()
        self._leaves.append((value, leaf))
        return leaf


def _is_marked(value: Any) -> bool:
    return isinstance(value, (Replicated, PerMicrobatch))


def _refuse_rows_of_an_array(name: str, value: Any) -> None:
    """Raise ValueError for a NumPy array and its like: all its rows would go to every microbatch."""
    if hasattr(value, "__array__") and hasattr(value, "ndim") and value.ndim:
        raise ValueError(
            f"{name} is a {type(value).__name__}, which is not split into microbatches: write "
            f"torch.as_tensor({name}); zbpp.replicate({name}) gives all of it to every microbatch"
        )


def _refuse_hidden_tensors(name: str, value: Any) -> None:
    """Raise ValueError for an object with tensors that pytree doesn't see: all rows would go everywhere."""
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
