"""What a source of batches offers beside its batches, and how each library asks for it.

                   epoch                              state                            length
    torch          set_epoch of a sampler             none                             len; TypeError: unknown
    torchdata      the same                           state_dict, load_state_dict      the same
    datasets       set_epoch of an IterableDataset    the same                         the same
    accelerate     set_epoch of a loader              with use_stateful_dataloader     the same
    Lightning      as torch                           as torchdata                     NotImplementedError

Some give each process other rows: torch's DistributedSampler has num_replicas, and accelerate's shards and
their state have num_processes.

A loader of torch's does not pass on what its dataset offers, so the parts of a loader are asked, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

_PARTS = ("sampler", "batch_sampler", "dataset", "datasets", "base_dataloader", "state")


def tell_epoch(source: Any, epoch: int) -> None:
    """Tell the epoch, from 0, to a source and to all its parts that take one."""
    for part in _parts(source, set()):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def _parts(source: Any, seen: set[int]) -> Iterator[Any]:
    """A source, its sampler, its dataset, the parts of these, ...: each once."""
    if id(source) in seen:
        return
    seen.add(id(source))
    yield source
    for name in _PARTS:
        inner = getattr(source, name, None)
        for each in inner if isinstance(inner, list | tuple) else [] if inner is None else [inner]:
            yield from _parts(each, seen)


def sharding_part(source: Any) -> str:
    """The class of the source, or of a part of it, that gives each process other rows; "": none does."""
    for part in _parts(source, set()):
        numbers = (getattr(part, name, None) for name in ("num_replicas", "num_processes"))
        if any(isinstance(each, int) and each > 1 for each in numbers):
            return type(part).__name__
    return ""


def stateful(source: Any) -> Any:
    """What has the state of a source: itself, or the IterableDataset that it reads; None: nothing has one.

    A dataset that worker processes read has its state there, where nobody asks.
    """
    if type(source) is DataLoader and isinstance(source.dataset, IterableDataset) and not source.num_workers:
        source = source.dataset
    has_one = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    # accelerate's loaders have the methods, but a state only with this switch.
    return source if has_one and getattr(source, "use_stateful_dataloader", True) else None


def length_of(source: Any) -> int | None:
    """How many batches or rows a source has; None: it doesn't say."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):  # also a DataLoader of an IterableDataset
        return None


def num_rest(source: Any) -> int:
    """The rows of a smaller batch that ends each epoch of a DataLoader; 0: none, or not known."""
    batches = source.batch_sampler if isinstance(source, DataLoader) else None
    size = getattr(batches, "batch_size", None)
    if not size or getattr(batches, "drop_last", True):
        return 0
    rows = length_of(getattr(batches, "sampler", None))
    return (length_of(source.dataset) or 0 if rows is None else rows) % int(size)
