"""How long the sequences of each microbatch are, where slices cut them along dimension 1.

The bounds of a pipeline's slices are those of a sequence of bounds[-1] tokens. The sequences of a
`per_microbatch` may have other lengths, one per microbatch: their bounds are at the same shares of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.runtime.call.marks import PerMicrobatch, is_marked
from zbpp.schedule.slice_bounds import scaled_bounds


class SequenceLengths:
    """The lengths of one call's sequences. bounds: of the slices; (): sequences are not cut."""

    def __init__(self, num_microbatches: int, bounds: Sequence[int]) -> None:
        self.num_microbatches, self.bounds = num_microbatches, tuple(bounds)
        self.num_slices = max(1, len(bounds) - 1)
        self._found: tuple[int, ...] = ()  # by microbatch, 0 for an empty one; (): not known

    def of_all(self) -> tuple[int, ...]:
        """The length of each microbatch's sequences; 0 for an empty one."""
        return self._found or self.bounds[-1:] * self.num_microbatches

    def bounds_of(self, microbatch: int) -> tuple[int, ...]:
        """The bounds of a microbatch's slices."""
        length = self.of_all()[microbatch]
        return scaled_bounds(self.bounds, length) if length else self.bounds

    def find(self, values: Mapping[str, Any]) -> None:
        """Take the lengths of the sequences from `values`: dimension 1 of the first tensor that has one.

        values: {name: value}, as they are given to `Cutter.cut`. In a `per_microbatch` each microbatch may
        have a length of its own. Raises ValueError if the slices do not fit a sequence, or if an earlier call
        of this method found other lengths.
        """
        if not self.bounds:
            return
        named = [(name, value, found) for name, value in values.items() if (found := _first_filled(value))]
        with_time = [each for each in named if sequence_length(each[2][0]) is not None]
        for name, value, found in (with_time or named)[:1]:
            marked = _first_per_microbatch(value)
            if marked is None:
                self._check_length(name, found[0])
                self._note(self.bounds[-1:] * self.num_microbatches)
            elif len(marked.values) == self.num_microbatches:  # else Cutter says so
                given = enumerate(marked.values)
                self._note(tuple([self._length_of(f"{name}, microbatch {i}", each) for i, each in given]))

    def tell(self, lengths: Sequence[int]) -> None:
        """Take the lengths that the first stage's rank tells, on a rank without inputs and target."""
        self._found = tuple(lengths)

    def _check_length(self, name: str, tensor: Tensor) -> None:
        if sequence_length(tensor) != self.bounds[-1]:
            raise ValueError(
                f"{name} {_shape_of(tensor)}, and slice_bounds cut sequences of "
                f"{self.bounds[-1]} tokens along dimension 1: give this length, or "
                "zbpp.per_microbatch([...]) with lengths of their own (evaluate_as_one and predict run "
                "sequences of any length whole)"
            )

    def _note(self, lengths: tuple[int, ...]) -> None:
        self.check(lengths)
        self._found = self._found or lengths

    def _length_of(self, name: str, value: Any) -> int:
        """How many tokens the sequences of a microbatch have; 0 for an empty one."""
        found = _first_filled(value)
        if not found:
            return 0
        length = sequence_length(found[0])
        if length is None or length < self.num_slices:
            raise ValueError(
                f"{name} {_shape_of(found[0])}, and slice_bounds cut its sequences into {self.num_slices} "
                "slices along dimension 1: give a tensor [batch, time] with a token at least for each slice"
            )
        return length

    @property
    def unequal(self) -> tuple[int, ...]:
        """The length of each microbatch's sequences, where slices cut several lengths; else ()."""
        return self._found if {*self._found} - {0, *self.bounds[-1:]} else ()

    def check(self, others: Sequence[int], left_out: Collection[int] = ()) -> None:
        """Raise ValueError if sequences are given here in other lengths; 0: an empty microbatch.

        others: of each microbatch; (): those of the bounds. left_out: the empty microbatches.
        """
        others = others or self.bounds[-1:] * self.num_microbatches
        for number, (own, other) in enumerate(zip(self._found, others, strict=False)):
            if own and other and own != other and number not in left_out:
                raise ValueError(
                    f"the sequences of microbatch {number} have {own} tokens in one argument, and {other} in "
                    "another one: with slices give inputs and targets of one length"
                )


def sequence_length(value: Tensor) -> int | None:
    """How many tokens a tensor has of each sequence, [batch, time, ...]; None without a dimension of time."""
    is_plain = value.layout is torch.strided and not value.is_nested
    return value.shape[1] if is_plain and value.dim() > 1 else None


def _first_per_microbatch(value: Any) -> PerMicrobatch | None:
    leaves = tree_leaves(value, is_leaf=is_marked)
    return next((each for each in leaves if isinstance(each, PerMicrobatch)), None)


def _shape_of(tensor: Tensor) -> str:
    return "is a nested tensor" if tensor.is_nested else f"has shape {list(tensor.shape)}"


def _first_filled(value: Any) -> list[Tensor]:
    return [each for each in _first_tensors(value) if each.numel()]


def _first_tensors(value: Any) -> list[Tensor]:
    """Return the first tensor that is cut; a tensor with a dimension 1 comes before tensors without one.

    If that is a `per_microbatch`, return the first tensor of each microbatch's value.
    """
    leaves = tree_leaves(value, is_leaf=is_marked)
    for leaf in leaves:
        if isinstance(leaf, PerMicrobatch):
            return [tensor for each in leaf.values for tensor in _first_tensors(each)[:1]]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [each for each in tensors if sequence_length(each) is not None][:1] or tensors[:1]
