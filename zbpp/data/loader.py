"""A user's own data: a torch Dataset or DataLoader, or any other iterable of batches.

Every rank makes its own loader, and all must see the same global batches; `zbpp train` compares the ranks'
fingerprints of the first batch. `shuffle=True` gives the same order on every rank: while a batch is made,
torch's random numbers are seeded by the batch's number. Code that draws from `random` or numpy, or in worker
processes, has to seed itself alike on every rank.

A run that goes on at step 1000 needs batch 1000:

    a map-style Dataset, a list          is asked for that batch
    a DataLoader of a map-style Dataset  draws the indices of the batches before, and loads none of them (only
                                         with a sampler of torch's, whose order the epoch's seed decides)
    has state_dict and load_state_dict   goes on from its own state, if the checkpoint has one
    anything else                        yields all batches before, and a warning says so
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zbpp.data.batch import num_rows, parts_of
from zbpp.data.dataset import DatasetBatches, is_map_style
from zbpp.data.source import Data
from zbpp.seeding import seed_of

_log = logging.getLogger(__name__)
_SECONDS_UNTIL_SAID = 2.0  # between two warnings about skipped batches

# Their order depends on nothing but random numbers. A user's own sampler may count its epochs, too.
_SAMPLERS = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler,
)  # fmt: skip
_ENDLESS = 2**40  # batches of a source that doesn't say how many it has
_NOTHING = object()


class Loaded:
    """Batches by number from an iterable; each pass through it is an epoch.

    Ask for batches in ascending order: a smaller number than the last one starts again from the first epoch.
    name: which batches these are, for error messages. Raises ValueError for a batch without `batch_size`
    rows.
    """

    draws_global_random = True

    def __init__(self, batches: Iterable[Any], *, batch_size: int, seed: int, name: str = "training") -> None:
        self._batches, self._batch_size, self._seed, self._name = batches, batch_size, seed, name
        self._generators = [(each, each.initial_seed()) for each in _generators_of(batches)]
        self._begin()

    def _begin(self) -> None:
        self._number, self._epoch, self._current = -1, -1, None
        self._iterator: Iterator[Any] = iter(())

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:  # also a DataLoader of an IterableDataset
            return _ENDLESS

    def batch(self, step: int) -> Any:
        """The batch of `step`, from 0; the latest batch is not loaded again."""
        if step < self._number or (step == self._number and self._current is None):
            self._begin()
        if (
            self._number < 1 < step
        ):  # only at the first batch: later the batches between are those of other replicas
            self._jump(step)
        began = said = time.monotonic()
        while self._number < step:
            self._current = self._next(self._number + 1)
            self._number += 1
            if self._number < step and (now := time.monotonic()) > said + _SECONDS_UNTIL_SAID:
                said = now
                _log.warning(
                    "skipping to %s batch %d: at batch %d after %.0f s; a map-style Dataset, or a loader "
                    "with state_dict and load_state_dict, needs no skipping",
                    self._name, step, self._number, now - began,
                )  # fmt: skip
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state after the latest batch; {} for a loader without a state."""
        if not _has_state(self._batches) or self._number < 0:
            return {}
        state = {"number": self._number, "epoch": self._epoch, "batch_size": self._batch_size}
        return {**state, "loader": self._batches.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that was the latest at `state_dict`; {}: skip the batches before.

        A state with batches of another size is not used, with a warning: batches are skipped instead.
        """
        if not state or not _has_state(self._batches):
            return
        if state["batch_size"] != self._batch_size:
            _log.warning(
                "the %s loader's state is of batches of %d rows, not %d: batches are skipped instead",
                self._name, state["batch_size"], self._batch_size,
            )  # fmt: skip
            return
        self._begin()
        self._batches.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        with torch.random.fork_rng([]):
            self._start_epoch(state["epoch"])
        self._number = state["number"]

    def _jump(self, step: int) -> None:
        """Load the batch of `step` without those before it, from a DataLoader of a map-style Dataset."""
        loader = self._batches
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None or _has_state(loader):
            return
        sampler = loader.batch_sampler
        if type(sampler) is not BatchSampler or type(sampler.sampler) not in _SAMPLERS:
            return
        if not is_map_style(loader.dataset):
            return
        epoch, place = divmod(step, len(loader))
        later = copy(loader)
        # A DataLoader sets both only in its constructor. _iterator: the processes of persistent_workers.
        later.__dict__ |= {
            "batch_sampler": _Later(sampler, place, seed_of(self._seed, "batch", step)),
            "_iterator": None,
        }
        with torch.random.fork_rng([]):
            self._start_epoch(epoch, later)
            self._current = next(self._iterator)
        _check_rows(self._current, step, self._batch_size, self._name)
        self._number = step

    def _start_epoch(self, epoch: int, batches: Iterable[Any] | None = None) -> None:
        # A DataLoader draws an epoch's order here. The seed is the epoch's, not the batch's: so the order is
        # the same whether one process reads an epoch, or replicas in smaller batches.
        self._epoch = epoch
        torch.default_generator.manual_seed(seed_of(self._seed, "epoch", epoch))
        for generator, seed in self._generators:
            generator.manual_seed(seed_of(seed, "epoch", epoch))
        batches = self._batches if batches is None else batches
        if isinstance(batches, DataLoader) and batches._iterator is not None:  # persistent_workers
            # A DataLoader's first iterator draws a seed for processes before the order; a later one does not.
            torch.empty((), dtype=torch.int64).random_(generator=batches.generator)
        self._iterator = iter(batches)

    def _next(self, number: int) -> Any:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed_of(self._seed, "batch", number))
            found = next(self._iterator, _NOTHING)
            if found is _NOTHING:
                self._start_epoch(0 if number == 0 else self._epoch + 1)
                found = next(self._iterator, _NOTHING)
        if found is _NOTHING:
            raise ValueError("the data has no batch at all: is a DataLoader with drop_last=True empty?")
        _check_rows(found, number, self._batch_size, self._name)
        return found


class ListedBatches:
    """A list of batches; each pass through the list is an epoch."""

    def __init__(self, batches: Sequence[Any], *, batch_size: int, name: str) -> None:
        if not batches:
            raise ValueError(f"the list of {name} batches is empty: give it one batch at least")
        for number, batch in enumerate(batches):
            if num_rows(batch) != batch_size:
                raise ValueError(
                    f"{name} batch {number} has {num_rows(batch) or 'no'} rows, but num_microbatches * "
                    f"microbatch_size is {batch_size}: leave it out, or write microbatches that fit"
                )
        self._batches = batches

    @property
    def num_batches(self) -> int:
        """The list's length."""
        return len(self._batches)

    def batch(self, step: int) -> Any:
        """The batch of `step`, from 0."""
        return self._batches[step % len(self._batches)]


class _Later:
    """A batch sampler that draws its first lists of indices, and leaves them out.

    seed: seeds torch's random numbers after that, as they would be if the batches before had been loaded.
    """

    def __init__(self, sampler: Any, skipped: int, seed: int) -> None:
        self._sampler, self._skipped, self._seed = sampler, skipped, seed

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self._sampler)
        for _ in range(self._skipped):
            next(indices, None)
        if self._skipped:
            torch.default_generator.manual_seed(self._seed)
        yield from indices

    def __len__(self) -> int:
        return len(self._sampler) - self._skipped


def _generators_of(batches: object) -> list[torch.Generator]:
    """The generators that a DataLoader or its sampler was given; the order of an epoch is drawn from them."""
    sampler = getattr(batches, "batch_sampler", None)
    places = (batches, sampler, getattr(sampler, "sampler", None))
    found = [getattr(each, "generator", None) for each in places]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _has_state(batches: object) -> bool:
    return callable(getattr(batches, "state_dict", None)) and callable(
        getattr(batches, "load_state_dict", None)
    )


def _check_rows(batch: Any, number: int, batch_size: int, name: str) -> None:
    rows = num_rows(batch)
    if rows != batch_size:
        given = "no tensor" if rows is None else f"{rows} rows"
        raise ValueError(
            f"{name} batch {number} has {given}, but num_microbatches * microbatch_size is {batch_size}: "
            f"give every batch so many (a DataLoader: batch_size={batch_size}, drop_last=True)"
        )


Loader = Loaded | ListedBatches | DatasetBatches


def loaded_data(given: Any, *, batch_size: int, seed: int, is_read: bool = True) -> Data:
    """`Data` from a Dataset, from something that yields batches, or from a pair (to train on, held out).

    A Dataset is read in batches of `batch_size`, shuffled unless it is an IterableDataset or held out.
    is_read: False on a rank between the first and the last stage, where not even the first batch is tried.
    Raises ValueError for anything else, and for first batches that don't fit.
    """
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    train = _loaded(pair[0], batch_size, seed, "training", shuffle=True)
    held_out = None if pair[1] is None else _loaded(pair[1], batch_size, seed, "held-out", shuffle=False)
    if is_read and held_out is not None and held_out.num_batches:
        parts_of(held_out.batch(0))
    return Data(
        train=train,
        evaluation=held_out or train,
        num_evaluation_batches=held_out.num_batches if held_out else 0,
        items_per_batch=batch_size,
        unit="rows",
        fingerprint=_fingerprint(train) if is_read else None,
    )


def _fingerprint(train: Loader) -> str:
    """A hash of the first batch and of the number of batches. Checks the parts of the first batch, too.

    A Dataset's fingerprint covers the first row that is trained on, 16 rows in all places of the Dataset, and
    the number of rows; not the first batch, since a resumed run may have larger batches.
    """
    first = train.batch(0)
    parts_of(first)
    if not isinstance(train, DatasetBatches):
        return fingerprint_of((first, train.num_batches))
    rows = tree_map(lambda each: each[:1] if isinstance(each, Tensor) else None, (first, *train.probes()))
    return fingerprint_of((rows, train.num_rows))


def _loaded(given: Any, batch_size: int, seed: int, name: str, *, shuffle: bool) -> Loader:
    if is_map_style(given):
        return DatasetBatches(given, batch_size=batch_size, seed=seed, shuffle=shuffle, name=name)
    batches = given
    if isinstance(given, Dataset):
        batches = DataLoader(given, batch_size=batch_size, drop_last=True)
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
    if isinstance(batches, Sequence):
        return ListedBatches(batches, batch_size=batch_size, name=name)
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
