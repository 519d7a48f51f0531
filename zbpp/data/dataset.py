"""Batches of a user's map-style Dataset: any batch can be read by its number, without those before it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.seeding import seed_of


class Rows(Protocol):
    """Rows by number: a torch Dataset, or one of Hugging Face's package `datasets`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def is_map_style(given: Any) -> bool:
    """Whether `given` has rows by number. A list does not count: it holds batches."""
    if isinstance(given, IterableDataset) or not isinstance(given, Sized):
        return False
    return isinstance(given, Dataset) or hasattr(given, "__getitems__")


_NUM_PROBED = 14  # rows between the first and the last one that a fingerprint covers


class DatasetBatches:
    """Batches of a Dataset's rows, put together by torch's default_collate.

    Each epoch takes every row once, in an order drawn from (seed, epoch); with `shuffle` False in the
    Dataset's own order. A batch may reach into the next epoch, so one large batch has the rows of several
    smaller ones. While a row is read, torch's random numbers are seeded by the row's place in the order of
    all epochs. name: what error messages call the data. Raises ValueError for fewer rows than a batch.
    """

    draws_global_random = True

    def __init__(self, rows: Rows, *, batch_size: int, seed: int, shuffle: bool, name: str) -> None:
        if len(rows) < batch_size:
            raise ValueError(
                f"the {name} Dataset has {len(rows)} rows, fewer than a batch (num_microbatches * "
                f"microbatch_size = {batch_size}): give more rows, or smaller batches"
            )
        self._rows, self._batch_size, self._seed, self._shuffle = rows, batch_size, seed, shuffle

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""
        return len(self._rows)

    @property
    def num_batches(self) -> int:
        """Whole batches per epoch."""
        return len(self._rows) // self._batch_size

    def batch(self, step: int) -> Any:
        """The batch of `step`, from 0."""
        first = step * self._batch_size
        samples = np.arange(first, first + self._batch_size)
        with torch.random.fork_rng([]):
            rows = [
                self._row(int(sample), int(row))
                for sample, row in zip(samples, self._order(samples), strict=True)
            ]
            return default_collate(rows)

    def probes(self) -> list[Any]:
        """The first row, the last one and some between, each as a batch of one: changed data show in them."""
        last = len(self._rows) - 1
        between = np.random.default_rng(last).integers(0, last + 1, _NUM_PROBED)
        with torch.random.fork_rng([]):
            return [default_collate([self._row(row, row)]) for row in sorted({0, last, *map(int, between)})]

    def _row(self, sample: int, row: int) -> Any:
        torch.default_generator.manual_seed(seed_of(self._seed, "row", sample))
        return self._rows[row]

    def _order(self, samples: Numbers) -> Numbers:
        epochs, places = np.divmod(samples, len(self._rows))
        if not self._shuffle:
            return places
        return permute(places, len(self._rows), keys_of(seed_of(self._seed, "order"), epochs))
