"""The storages of a tensor, also of one that consists of other tensors (sparse tensors, DTensors)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storage of a tensor; of a sparse tensor or a DTensor, the storages of the tensors inside it."""
    return (part.untyped_storage() for part in tensors_inside(tensor))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' storages on this rank; each storage counts once."""
    found = {storage._cdata: storage.nbytes() for each in tensors for storage in storages_of(each)}
    return sum(found.values())


def tensors_inside(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a sparse tensor or a DTensor consists of; any other tensor itself."""
    if tensor.is_sparse:
        parts = [tensor._indices(), tensor._values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        parts = [part for part in inner if isinstance(part, Tensor)]  # DTensor lists its mesh, too
    else:
        yield tensor
        return
    for part in parts:
        yield from tensors_inside(part)
