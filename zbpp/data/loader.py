"""A user's own data: a map-style Dataset, or anything else that yields batches again and again.

Every rank makes its own loader, and all must see the same global batches; `zbpp train` compares the ranks'
fingerprints of the first batch. `shuffle=True` gives the same order on every rank: while a batch is made,
torch's, Python's and numpy's random numbers are seeded by the batch's number. A DataLoader seeds its worker
processes from them. Afterwards the process draws what it would have drawn without the data.

A run that goes on at step 1000 needs batch 1000:

    a map-style Dataset                  is asked for that batch
    has state_dict and load_state_dict   goes on from its own state: torchdata's StatefulDataLoader,
                                         an IterableDataset of `datasets`
    anything else                        yields all batches before: a DataLoader, a list
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.prepared import digest_of
from zbpp.data.protocols import length_of, num_rest, sharding_part, stateful, tell_epoch
from zbpp.data.sequences import Known, Watch, check_sequence
from zbpp.data.source import Data, as_tensors, num_rows, parts_of
from zbpp.seeding import restored_python_generators, seed_of, seed_python_generators

_log = logging.getLogger(__name__)
_SAID = 100  # batches that are dropped without a warning
_ENDLESS = 2**40  # batches of a source that doesn't say how many it has
_NOTHING = object()
Collate = Callable[[list[Any]], Any]
_NUM_PROBED = 14  # rows between the first and the last one that a fingerprint covers


class Rows(Protocol):
    """Rows by number: a torch Dataset, or one of Hugging Face's package `datasets`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def is_map_style(given: Any) -> bool:
    """Whether `given` has rows by number. A list does not count: it holds batches."""
    if isinstance(given, IterableDataset) or not isinstance(given, Sized):
        return False
    return isinstance(given, Dataset) or hasattr(given, "__getitems__")


class DatasetBatches:
    """Batches of a Dataset's rows, put together by `collate`.

    Each epoch takes every row once, in an order drawn from (seed, epoch); with `shuffle` False in the
    Dataset's own order. A batch may reach into the next epoch, so one large batch has the rows of several
    smaller ones. While a row is read, torch's random numbers are seeded by the row's place in the order of
    all epochs. name: what error messages call the data. Raises ValueError for fewer rows to train on than a
    batch.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        name: str,
        collate: Collate = default_collate,
    ) -> None:
        if shuffle and len(rows) < batch_size:
            raise ValueError(
                f"the {name} Dataset has {len(rows)} rows, fewer than a batch (num_microbatches * "
                f"microbatch_size = {batch_size}): give more rows, or smaller batches"
            )
        self._rows, self._batch_size, self._seed, self._shuffle = rows, batch_size, seed, shuffle
        self._collate, self._epoch = collate, -1  # none told so far

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""
        return len(self._rows)

    @property
    def num_batches(self) -> int:
        """Whole batches per epoch."""
        return len(self._rows) // self._batch_size

    @property
    def num_rest(self) -> int:
        """Rows of an epoch behind its last whole batch."""
        return len(self._rows) % self._batch_size

    def batch(self, step: int) -> Any:
        """The batch of `step`, from 0. Raises ValueError for rows that don't stack."""
        first = step * self._batch_size
        samples = np.arange(first, first + self._batch_size)
        with _own_random_numbers():
            rows = [
                self._row(int(sample), int(row))
                for sample, row in zip(samples, self._order(samples), strict=True)
            ]
            try:
                return self._collate(rows)
            except RuntimeError as error:
                raise ValueError(
                    f"rows of a batch differ in shape ({error}): give rows of one shape, or write "
                    "data.batching=tokens, which takes sequences of any lengths"
                ) from error

    def probes(self) -> list[Any]:
        """The first row, the last one and some between, each as a batch of one: changed data show in them."""
        last = len(self._rows) - 1
        between = np.random.default_rng(last).integers(0, last + 1, _NUM_PROBED)
        with _own_random_numbers():
            return [self._collate([self._row(row, row)]) for row in sorted({0, last, *map(int, between)})]

    def sequences(self, watch: Watch) -> Known:
        """The rows, of which each tensor has one entry per token.

        A Dataset's attribute `lengths` says how many tokens its rows have; without it every row is read once.
        """
        known = getattr(self._rows, "lengths", None)
        if known is not None and len(known) != len(self._rows):
            raise ValueError(
                f"the Dataset has {len(self._rows)} rows, and its lengths are {len(known)}: give one for "
                "each row"
            )
        with _own_random_numbers():
            lengths = (
                [check_sequence(self._row(row, row)) for row in watch(range(len(self._rows)))]
                if known is None
                else known
            )

        def read(sample: int) -> Any:
            with _own_random_numbers():
                return self._row(sample, int(self._order(np.array([sample]))[0]))

        return Known(np.array(lengths, dtype=np.int64), self._order, read)

    def _row(self, sample: int, row: int) -> Any:
        if (epoch := sample // len(self._rows)) != self._epoch:
            self._epoch = epoch
            tell_epoch(self._rows, epoch)
        _seed_all(seed_of(self._seed, "row", sample))
        return as_tensors(self._rows[row])

    def _order(self, samples: Numbers) -> Numbers:
        epochs, places = np.divmod(samples, len(self._rows))
        if not self._shuffle:
            return places
        return permute(places, len(self._rows), keys_of(seed_of(self._seed, "order"), epochs))


class IteratedBatches:
    """Batches by number from an iterable; each pass through it is an epoch.

    Ask for batches in ascending order: a smaller number than the last one starts again from the first epoch.
    name: which batches these are, for error messages. num_rest: the rows of a smaller batch that ends each
    epoch; 0: all batches are whole. Raises ValueError for a batch of another number of rows.
    """

    def __init__(
        self, batches: Iterable[Any], *, batch_size: int, seed: int, name: str = "training", num_rest: int = 0
    ) -> None:
        self._batches, self._batch_size, self._seed, self._name = batches, batch_size, seed, name
        self.num_rest = num_rest
        self._begin()

    def _begin(self) -> None:
        self._number, self._epoch, self._current = -1, -1, None
        self._iterator: Iterator[Any] = iter(())

    @property
    def num_batches(self) -> int:
        """How many whole batches an epoch has."""
        known = length_of(self._batches)
        return _ENDLESS if known is None else known - bool(self.num_rest)

    def batch(self, step: int) -> Any:
        """The batch of `step`, from 0; the latest batch is not loaded again."""
        if step < self._number or (step == self._number and self._current is None):
            self._begin()
        if step > self._number + _SAID:
            _log.warning(
                "the %s loader reads and drops the batches before batch %d; a map-style Dataset, or a loader "
                "with state_dict and load_state_dict, needs not",
                self._name, step,
            )  # fmt: skip
        while self._number < step:
            self._current = self._next(self._number + 1)
            self._number += 1
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state after the latest batch; {} for a loader without a state."""
        source = stateful(self._batches)
        if source is None or self._number < 0:
            return {}
        state = {"number": self._number, "epoch": self._epoch, "batch_size": self._batch_size}
        return {**state, "loader": source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that was the latest at `state_dict`; {}: drop the batches before.

        A state with batches of another size is not used, with a warning: batches are dropped instead.
        """
        source = stateful(self._batches)
        if not state or source is None:
            return
        if state["batch_size"] != self._batch_size:
            _log.warning(
                "the %s loader's state is of batches of %d rows, not %d: batches are dropped instead",
                self._name, state["batch_size"], self._batch_size,
            )  # fmt: skip
            return
        self._begin()
        source.load_state_dict(state["loader"])
        with _own_random_numbers():
            self._start_epoch(state["epoch"])
        self._number = state["number"]

    def _start_epoch(self, epoch: int) -> None:
        # A DataLoader draws an epoch's order here. The seed is the epoch's, not the batch's: so the order is
        # the same whether one process reads an epoch, or replicas in smaller batches.
        self._epoch = epoch
        _seed_all(seed_of(self._seed, "epoch", epoch))
        tell_epoch(self._batches, epoch)
        self._iterator = iter(self._batches)

    def _next(self, number: int) -> Any:
        with _own_random_numbers():
            _seed_all(seed_of(self._seed, "batch", number))
            found = next(self._iterator, _NOTHING)
            if found is _NOTHING:
                self._start_epoch(self._epoch + 1)
                found = next(self._iterator, _NOTHING)
        if found is _NOTHING:
            raise ValueError(
                f"the {self._name} data has no batch: is a DataLoader with drop_last=True empty?"
            )
        found = as_tensors(found)
        _refuse_columns(found)
        if num_rows(found) not in (self._batch_size, self.num_rest or self._batch_size):
            raise ValueError(
                f"{self._name} batch {number} has {num_rows(found) or 'no'} rows, but num_microbatches * "
                f"microbatch_size is {self._batch_size}: give every batch so many (a DataLoader: "
                f"batch_size={self._batch_size}, drop_last=True)"
            )
        return found


def _refuse_columns(batch: Any) -> None:
    """Raise ValueError for tokens as torch's collate makes them of rows with lists: a tensor per position."""
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if name in ("input_ids", "labels") and isinstance(value, list):
            raise ValueError(
                f"{name} is a list of {len(value)} tensors, one per position, since rows have lists: write "
                '.with_format("torch") behind a Dataset of `datasets`, or give the Dataset itself'
            )


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """What is drawn inside changes no random number that is drawn afterwards."""
    with torch.random.fork_rng([]), restored_python_generators():
        yield


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    seed_python_generators(seed)


def loaded_data(
    given: Any, *, batch_size: int, seed: int, is_read: bool = True, collate: Collate = default_collate
) -> Data:
    """`Data` from a Dataset, from something that yields batches, or from a pair (to train on, held out).

    A Dataset is read in batches of `batch_size`, shuffled unless it is an IterableDataset or held out.
    is_read: False on a rank between the first and the last stage, where not even the first batch is tried.
    collate: makes a batch of a Dataset's rows.
    Raises ValueError for anything else, and for first batches that don't fit.
    """
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    how: Any = {"batch_size": batch_size, "seed": seed, "collate": collate}
    train = _loaded(pair[0], **how, name="training", shuffle=True)
    held_out = None if pair[1] is None else _loaded(pair[1], **how, name="held-out", shuffle=False)
    if is_read and held_out is not None and (held_out.num_batches or held_out.num_rest):
        parts_of(held_out.batch(0))
    return Data(
        train=train,
        evaluation=held_out or train,
        num_evaluation_batches=held_out.num_batches if held_out else 0,
        items_per_batch=batch_size,
        unit="rows",
        fingerprint=_fingerprint(train) if is_read else None,
        num_evaluation_rest=held_out.num_rest if held_out else 0,
    )


def _loaded(
    given: Any, *, batch_size: int, seed: int, name: str, shuffle: bool, collate: Collate
) -> DatasetBatches | IteratedBatches:
    if is_map_style(given):
        how: Any = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "name": name}
        return DatasetBatches(given, **how, collate=collate)
    batches = given
    if isinstance(given, Dataset):
        batches = DataLoader(
            given, batch_size, drop_last=True, collate_fn=lambda rows: collate([*map(as_tensors, rows)])
        )
    if not isinstance(batches, Iterable) or isinstance(batches, str | Mapping | Tensor | Iterator):
        raise ValueError(
            f"a {type(given).__name__} does not yield batches again and again: give a torch Dataset, a "
            "DataLoader, a list of batches, a pair of such (to train on, held out), or a zbpp.data.Data"
        )
    sharding = sharding_part(batches)
    if sharding:
        raise ValueError(
            f"the {name} data come through a {sharding}, which gives each process other rows: leave it "
            "out, or accelerate's prepare. All ranks of a pipeline read the same batches, and each replica "
            "takes its own by their number"
        )
    rest = num_rest(batches)
    if rest and shuffle:  # otherwise a run would fail at the end of its first epoch
        raise ValueError(f"the {name} DataLoader ends with {rest} rows: give it drop_last=True")
    return IteratedBatches(batches, batch_size=batch_size, seed=seed, name=name, num_rest=rest)


def _fingerprint(train: DatasetBatches | IteratedBatches) -> str:
    """A hash of the first batch and of the number of batches. Checks the parts of the first batch, too.

    A Dataset's fingerprint covers the first row that is trained on, 16 rows in all places of the Dataset, and
    the number of rows; not the first batch, since a resumed run may have larger batches.
    """
    first = train.batch(0)
    parts_of(first)
    if isinstance(train, IteratedBatches):
        return fingerprint_of((first, train.num_batches))
    rows = tree_map(lambda each: each[:1] if isinstance(each, Tensor) else None, (first, *train.probes()))
    return fingerprint_of((rows, train.num_rows))


def fingerprint_of(batch: Any) -> str:
    """16 hex digits that depend on the batch's structure and its tensors' values."""
    leaves, structure = tree_flatten(batch)
    contents: list[bytes | memoryview] = [str(structure).encode()]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            contents.append(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            contents.append(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            contents.append(repr(leaf).encode())
    return digest_of(*contents)
