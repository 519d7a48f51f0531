"""`Data`: batches by number, and facts about them.

A batch depends on the arguments and on its number, and on nothing else. So a checkpoint needs the step alone,
and any number of ranks sees the same global batches. `Data.state_dict()` is empty, except for a user's own
loader that has a state, see loader.py.

For data of your own, name in the config a function, or a torch Dataset class, that makes them (`data=custom
data._target_=my_file.my_data`). The function gets `batch_size` (rows of a whole batch) and `seed` if it takes
them. It returns a torch Dataset, a DataLoader (with that batch size and drop_last=True), a list of batches, a
pair of any of these (to train on, held out), or a `Data`. What a batch may be:

    (inputs, target), or (x, y, ..., target)       positional inputs in their order, the target last
    {"target": ..., "x": ..., "y": ...}            the target is called target, labels or shift_labels; a
                                                   single other entry is the input, several go to stage 0 by
                                                   name

With a model of transformers `labels` mean what they mean to transformers (zbpp/models/hf/labels.py); with any
other model the three names mean the same: what the loss gets.

An input may be nested: ((x, t), target) has one input, a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.stage_api import IGNORED, TargetNames

_TARGETS = ("target", "labels", "shift_labels")


class Source(Protocol):
    """Whole batches by number, the same on every rank."""

    def batch(self, step: int) -> Any: ...


class Data(NamedTuple):
    """Batches to train on and to evaluate on, by number, and facts about them."""

    train: Source
    evaluation: Source
    num_evaluation_batches: int
    items_per_batch: int
    fingerprint: str | None  # equal on two ranks that read the same data; None on a rank that reads none
    unit: str = "tokens"  # what the items of a batch are: "tokens" or "rows"
    num_evaluation_rest: int = 0  # rows that are held out behind these batches, the first of the next batch
    padding: float = 0.0  # the share of a batch's items that fills rows up, on average
    notes: tuple[str, ...] = ()  # what a run says of the data: lines
    is_shared: bool = False  # whether all replicas and shards together have a batch, or each one of its own

    @property
    def filled_items(self) -> float:
        """Items of a batch that are no padding, on average."""
        return self.items_per_batch * (1 - self.padding)

    def batches_per_step(self, num_parts: int) -> int:
        """How many batches a step has, of so many replicas and shards."""
        return 1 if self.is_shared else num_parts

    def with_facts_of(self, other: Data) -> Data:
        """These batches, with the facts of another rank, which has read the data."""
        return other._replace(train=self.train, evaluation=self.evaluation)

    def state_dict(self) -> dict[str, Any]:
        """The state to save beside the step. It is {} for all of zbpp's data, which need the step alone.

        Ask the rank that reads the first replica's data: other replicas are at later batches.
        """
        found: dict[str, Any] = getattr(self.train, "state_dict", dict)()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; batches are asked for by the same numbers as before. {} fits all data."""
        load = getattr(self.train, "load_state_dict", None)
        if load is not None:
            load(state)


class Unread:
    """Stands for the batches of a rank between the first and the last stage, which reads none."""

    def batch(self, number: int) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(f"batch {number} was asked for on a rank that has neither first nor last stage")


def unread_data(items_per_batch: int) -> Data:
    """The data of a rank that reads none. Other ranks give the facts about it: see `Data.with_facts_of`."""
    return Data(Unread(), Unread(), 0, items_per_batch, fingerprint=None)


def parts_of(batch: Any) -> tuple[tuple[Any, ...] | dict[str, Any], Any]:
    """(inputs by position or by name, target). Raises ValueError for a batch in none of these forms."""
    if isinstance(batch, Mapping):
        target = _target_in(batch)
        return {name: value for name, value in batch.items() if name != target}, batch[target]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise ValueError(
        f"a batch is a {type(batch).__name__}{length}: give (inputs, target), or a dict with the target "
        "under target, labels or shift_labels"
    )


def _target_in(batch: Mapping[str, Any]) -> str:
    """The name of the target in a dict. Raises ValueError unless there is one, beside an input."""
    named = [name for name in _TARGETS if name in batch]
    if len(named) != 1 or len(batch) < 2:
        raise ValueError(
            f"a batch has the entries {', '.join(map(str, batch)) or '(none)'}: call one of them "
            f"{', '.join(_TARGETS[:-1])} or {_TARGETS[-1]}, the others are the model's inputs"
        )
    return named[0]


def with_target(batch: Any, names: TargetNames) -> Any:
    """A batch, or a row of one, whose target is called target and made as `names` says (zbpp/stage_api.py).

    Raises ValueError for a dict without a target.
    """
    if not isinstance(batch, Mapping):
        return batch
    name = _target_in(batch)
    if name not in names:
        return batch
    inputs = {key: value for key, value in batch.items() if key != name}
    return {**inputs, "target": names[name](batch[name])}


def has_targets_of_inputs(batch: Any) -> bool:
    """Whether the target of a batch is one of its inputs: the same whole numbers wherever it is not -100."""
    inputs, target = parts_of(batch)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        return False
    counts = target != IGNORED
    same = [
        each[counts] == target[counts]
        for each in tree_leaves(inputs)
        if isinstance(each, Tensor) and each.shape == target.shape
    ]
    return bool(counts.sum() > 1) and any(bool(each.all()) for each in same)


def as_tensors(batch: Any) -> Any:
    """A batch, or a row of one, whose lists of numbers and arrays are tensors, and whose mappings are dicts.

    A batch that is a list is a list of parts, so it stays one. torch's pytree knows no other mappings than
    dicts, such as transformers' BatchEncoding. Raises ValueError for a list of lists of different lengths,
    and for an array with negative strides.
    """

    def is_leaf(value: Any) -> bool:
        return isinstance(value, Mapping) or (value is not batch and _is_numbers(value))

    def made(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: tree_map(made, each, is_leaf=is_leaf) for name, each in value.items()}
        try:
            return torch.as_tensor(value) if _is_numbers(value) else value
        except ValueError as error:
            wanted = "lists of numbers must have one length, and arrays no negative strides"
            raise ValueError(f"{wanted}: {error}") from error

    return tree_map(made, batch, is_leaf=is_leaf)


def _is_numbers(value: Any) -> bool:
    """Whether a value is an array of numbers, or a list of numbers or of such lists."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(value, list) and isinstance(first, Number)


def num_rows(batch: Any) -> int | None:
    """The length of dim 0 of the batch's first tensor; None without such a tensor."""
    lengths = (len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(lengths, None)


def check_at_least_one(**sizes: int) -> None:
    """Raises ValueError naming the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be positive: write 1 or more")


def check_vocab_size(needed: int, vocab_size: int) -> None:
    """Raises ValueError if the data need a larger vocabulary than the model's."""
    if needed > vocab_size:
        raise ValueError(
            f"the data has {needed} tokens, the model's vocab_size={vocab_size} is smaller: write "
            f"model.vocab_size={needed}, or take the model's own tokenizer"
        )


def check_share(held_out: float) -> None:
    """Raises ValueError for a share that leaves nothing to train on."""
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} is a share of the data: write 0.0 to 0.99")
