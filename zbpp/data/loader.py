"""A user's own data: a torch Dataset or DataLoader, or anything else that yields batches again and again.

Every rank makes its own loader, and all must see the same global batches; `zbpp train` compares the ranks'
fingerprints of the first batch. `shuffle=True` gives the same order on every rank: while a batch is made,
torch's random numbers are seeded by the batch's number. Code that draws from `random` or numpy, or in worker
processes, has to seed itself alike on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, IterableDataset

from zbpp.data.batch import num_rows, parts_of
from zbpp.data.source import Data
from zbpp.seeding import seed_of

_ENDLESS = 2**40  # batches of a source that doesn't say how many it has


class Loaded:
    """Batches by number from something that can be iterated over again; each iteration is an epoch.

    Ask for batches in ascending order: a smaller number than the last one starts again from the first epoch.
    name: which batches these are, for error messages. Raises ValueError for a batch without `batch_size`
    rows.
    """

    def __init__(self, batches: Iterable[Any], *, batch_size: int, seed: int, name: str = "training") -> None:
        self._batches, self._batch_size, self._seed, self._name = batches, batch_size, seed, name
        self._number, self._epoch, self._current = -1, -1, None
        self._iterator: Iterator[Any] = iter(())

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has."""
        return len(self._batches) if isinstance(self._batches, Sized) else _ENDLESS

    def batch(self, step: int) -> Any:
        """The batch of `step`, from 0; the latest batch is not loaded again."""
        if step < self._number:
            self._number, self._iterator = -1, iter(())
        while self._number < step:
            self._current = self._next(self._number + 1)
            self._number += 1
        return self._current

    def _next(self, number: int) -> Any:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed_of(self._seed, "batch", number))
            found = next(self._iterator, _NOTHING)
            if found is _NOTHING:
                # A DataLoader draws an epoch's order here. The seed is the epoch's, not the batch's: so the
                # order is the same whether one process reads an epoch, or replicas in smaller batches.
                self._epoch = 0 if number == 0 else self._epoch + 1
                torch.default_generator.manual_seed(seed_of(self._seed, "epoch", self._epoch))
                self._iterator = iter(self._batches)
                found = next(self._iterator, _NOTHING)
        if found is _NOTHING:
            raise ValueError("the data has no batch at all: is a DataLoader with drop_last=True empty?")
        rows = num_rows(found)
        if rows != self._batch_size:
            given = "no tensor" if rows is None else f"{rows} rows"
            raise ValueError(
                f"{self._name} batch {number} has {given}, but num_microbatches * microbatch_size is "
                f"{self._batch_size}: give every batch so many (a DataLoader: batch_size={self._batch_size}, "
                "drop_last=True)"
            )
        return found


_NOTHING = object()


def loaded_data(given: Any, *, batch_size: int, seed: int) -> Data:
    """`Data` from a Dataset, from something that yields batches, or from a pair (to train on, held out).

    A Dataset is read in batches of `batch_size`, shuffled unless it is an IterableDataset or held out. Raises
    ValueError for anything else, and for first batches that don't fit.
    """
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    train = _loaded(pair[0], batch_size, seed, "training", shuffle=True)
    held_out = None if pair[1] is None else _loaded(pair[1], batch_size, seed, "held-out", shuffle=False)
    first = train.batch(0)
    if held_out is not None and held_out.num_batches:
        parts_of(held_out.batch(0))
    parts_of(first)
    return Data(
        train=train,
        evaluation=held_out or train,
        num_evaluation_batches=held_out.num_batches if held_out else 0,
        items_per_batch=batch_size,
        unit="rows",
        fingerprint=fingerprint_of(first),
    )


def _loaded(given: Any, batch_size: int, seed: int, name: str, *, shuffle: bool) -> Loaded:
    batches = given
    if isinstance(given, Dataset):
        shuffle = shuffle and not isinstance(given, IterableDataset)
        batches = DataLoader(given, batch_size=batch_size, shuffle=shuffle, drop_last=True)
    if not isinstance(batches, Iterable) or isinstance(batches, str | dict | Tensor):
        raise ValueError(
            f"a {type(given).__name__} yields no batches: give a torch Dataset, a DataLoader, a list of "
            "batches, a pair of such (to train on, held out), or a zbpp.data.Data"
        )
    if isinstance(batches, DataLoader) and not batches.drop_last and isinstance(batches.dataset, Sized):
        rest = len(batches.dataset) % (batches.batch_size or 1)
        if rest:
            raise ValueError(
                f"an epoch of the {name} DataLoader ends with {rest} rows: give it drop_last=True"
            )
    for number, batch in enumerate(batches if isinstance(batches, Sequence) else ()):
        if num_rows(batch) != batch_size:
            raise ValueError(
                f"{name} batch {number} has {num_rows(batch) or 'no'} rows, but num_microbatches * "
                f"microbatch_size is {batch_size}: leave it out, or write microbatches that fit"
            )
    if isinstance(batches, Iterator):
        raise ValueError(
            f"a {type(given).__name__} ends after one epoch: give something that can be iterated over again, "
            "such as a DataLoader or a list of batches"
        )
    return Loaded(batches, batch_size=batch_size, seed=seed, name=name)


def fingerprint_of(batch: Any) -> str:
    """16 hex digits that depend on the batch's structure and its tensors' values."""
    leaves, structure = tree_flatten(batch)
    digest = blake2b(str(structure).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
