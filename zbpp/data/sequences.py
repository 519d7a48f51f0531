"""Sequences of different lengths by number, and microbatches made of them.

A sequence is a row of a batch without the batch's dimension: in (inputs, labels), or in a dict with
`target`, `labels` or `shift_labels`, each tensor has one entry per token. A microbatch of several sequences
is

    padded    rows as long as the longest of them; the label of padding is -100, everything else of it is 0
    packed    one row, which has them one after the other, and `position_ids` that begin at 0 with each

Causal attention does not see later tokens, so padding at the end of a row needs no mask. Packed sequences do:
the model keeps them apart by the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zbpp.data.permutation import Numbers
from zbpp.data.source import parts_of
from zbpp.stage_api import IGNORED


class Sequences(Protocol):
    """Sequences by number, from 0 through all epochs. longest, mean: their tokens."""

    @property
    def longest(self) -> int: ...

    @property
    def mean(self) -> float: ...

    def lengths(self, samples: Numbers) -> Numbers:
        """How many tokens each of these sequences has, at least one."""
        ...

    def sequence(self, sample: int) -> Any:
        """The sequence of this number."""
        ...


Watch = Callable[[range], Iterable[int]]
"""Passes numbers on, and may show how far it is."""


def sequences_of(source: object, watch: Watch = iter) -> Sequences:
    """The sequences that a source of batches is made of. watch: of rows that are read for their lengths.

    Raises ValueError if the source has none, or can't know their lengths.
    """
    make = getattr(source, "sequences", None)
    if not callable(make):
        raise ValueError(
            f"batching=tokens needs sequences by number, and {type(source).__name__} has none: choose chat, "
            "text or tokens, or give a map-style Dataset whose rows are sequences"
        )
    found: Sequences = make(watch)
    return found


def padded_rows(rows: Sequence[Any]) -> Any:
    """A batch of a Dataset's rows. Raises ValueError for a row that is no sequence."""
    for each in rows:
        check_sequence(each)
    return padded(rows)


def can_be_packed(sequence: Any) -> bool:
    """Whether a sequence is tokens and labels alone: no other input could be told apart by positions."""
    inputs, labels = parts_of(sequence)
    tokens = [*(inputs.values() if isinstance(inputs, dict) else inputs)]
    only = tokens[0] if len(tokens) == 1 else None
    return all(isinstance(each, Tensor) and each.dim() == 1 for each in (only, labels)) and _is_whole(only)


def check_sequence(sequence: Any) -> int:
    """The number of tokens of a sequence. Raises ValueError for what is none."""
    _, labels = parts_of(sequence)
    if not isinstance(labels, Tensor) or not labels.dim() or not _is_whole(labels):
        what = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"the target of a sequence is {what}: data.batching=tokens needs whole numbers, one per token, "
            "of which -100 is none"
        )
    shapes = [tuple(each.shape) for each in tree_leaves(sequence) if isinstance(each, Tensor)]
    if not len(labels) or any(shape[:1] != (len(labels),) for shape in shapes):
        raise ValueError(
            f"a sequence has tensors of the shapes {', '.join(map(str, map(list, shapes)))}: give each one "
            "entry per token, and at least one"
        )
    return len(labels)


def padded(sequences: Sequence[Any]) -> Any:
    """A microbatch with a row per sequence."""
    rows = [*map(parts_of, sequences)]
    longest = max(len(labels) for _, labels in rows)
    inputs = _stacked([inputs for inputs, _ in rows], longest, 0)
    return _like(sequences[0], inputs, _stacked([labels for _, labels in rows], longest, IGNORED))


def packed(sequences: Sequence[Any]) -> dict[str, Tensor]:
    """A microbatch of one row. Raises ValueError for sequences that are not tokens and labels alone."""
    if not can_be_packed(sequences[0]):
        raise ValueError("a packed row has tokens and labels: these sequences have other inputs, too")
    rows = [*map(parts_of, sequences)]
    tokens = [next(iter(inputs.values() if isinstance(inputs, dict) else inputs)) for inputs, _ in rows]
    return {
        "input_ids": torch.cat(tokens)[None],
        "position_ids": torch.cat([torch.arange(len(each)) for each in tokens])[None],
        "target": torch.cat([labels for _, labels in rows])[None],
    }


def nothing(like: Any) -> Any:
    """A sequence of one token without a label, of the form of another one: it adds nothing to any loss."""
    first = tree_map(lambda each: each[:1] if isinstance(each, Tensor) else each, like)
    inputs, labels = parts_of(first)
    return _like(like, inputs, torch.full_like(labels, IGNORED))


def _like(sequence: Any, inputs: Any, labels: Any) -> Any:
    """Inputs and labels in the form of a sequence."""
    if isinstance(sequence, Mapping):
        name = next(each for each in sequence if each not in inputs)
        return {key: labels if key == name else inputs[key] for key in sequence}
    return (*inputs, labels)


def _stacked(values: Sequence[Any], length: int, filling: int) -> Any:
    """Values of the same structure, their tensors filled up to `length` entries and stacked."""
    leaves, structures = zip(*map(tree_flatten, values), strict=True)
    columns = [_rows(column, length, filling) for column in zip(*leaves, strict=True)]
    return tree_unflatten(columns, structures[0])


def _rows(column: Sequence[Any], length: int, filling: int) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    rows = first.new_full((len(column), length, *first.shape[1:]), filling)
    for row, each in zip(rows, column, strict=True):
        row[: len(each)] = each
    return rows


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )


class Known:
    """Sequences that are rows by number, in an order of their own in each epoch.

    lengths: of each row, in tokens. places: the rows of samples. read: the sequence of a sample. Raises
    ValueError, when a sequence is read, for one that has not the length that is known.
    """

    def __init__(
        self, lengths: Numbers, places: Callable[[Numbers], Numbers], read: Callable[[int], Any]
    ) -> None:
        self._lengths, self._places, self._read = lengths, places, read
        self.longest, self.mean = int(lengths.max()), float(lengths.mean())

    def lengths(self, samples: Numbers) -> Numbers:
        """See `Sequences.lengths`."""
        found: Numbers = self._lengths[self._places(samples)]
        return found

    def sequence(self, sample: int) -> Any:
        """See `Sequences.sequence`."""
        found = self._read(sample)
        length, known = check_sequence(found), int(self.lengths(np.array([sample]))[0])
        if length != known:
            raise ValueError(
                f"sequence {sample} has {length} tokens, and had {known} when its length was read: lengths "
                "must not depend on when a sequence is read"
            )
        return found
