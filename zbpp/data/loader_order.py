"""The order of a torch DataLoader without its rows: for a run that goes on, and loads no batch twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader


class Later:
    """A batch sampler without its first lists of indices, which are drawn all the same.

    seed: torch's random numbers are seeded by it after that, as if the batches before had been loaded.
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


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [each for each in found if each is not None]


def generators_of(batches: object) -> list[torch.Generator]:
    """The random numbers that a DataLoader draws orders from, if they are not torch's global ones."""
    if not isinstance(batches, DataLoader):
        return []
    found = [getattr(each, "generator", None) for each in (batches, *_samplers_of(batches))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def can_skip_epochs(loader: DataLoader[Any]) -> bool:
    """Whether a later epoch's order is known: a sampler of the user's own may count its epochs itself.

    Workers that persist take their seed in the first epoch only, so the draws of later ones would differ.
    """
    if loader.persistent_workers and generators_of(loader):
        return False
    return all(type(each).__module__.startswith("torch.utils.data") for each in _samplers_of(loader))


def draw_orders(loader: DataLoader[Any], seeds: Sequence[int]) -> None:
    """Leave the generators as they are behind as many epochs as there are seeds of torch's global numbers."""
    with torch.random.fork_rng([]):
        for seed in seeds:
            torch.default_generator.manual_seed(seed)
            # As an iterator of torch's does: first a seed for the worker processes, then the order.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            for _ in loader.batch_sampler or ():
                pass
