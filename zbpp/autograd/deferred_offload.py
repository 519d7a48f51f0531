"""What B leaves for W (each site's x and dy) leaves device memory, and comes back before W.

    away = DeferredTensors(weight_grads, copier)    # behind B
    away.offload()                  # start to copy: device -> host
    away.drop()                     # the copies have ended: device memory is freed
    away.fetch()                    # start to copy: host -> device
    away.wait()                     # W may read
    weight_grads.accumulate()       # W: as without

A STORAGE leaves if only the tensors that W will read use it. Then nobody can miss its content: the storage
gives up its memory (`resize_`) and gets other memory later, while the tensors over it, their counts of
in-place changes included, stay as they are. A storage that others use would not be freed anyway and stays: a
received message in the pool, a gradient that is being sent, what the caller or a hook holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from zbpp.autograd.copies import Copier, Copy, OffloadError, Watch
from zbpp.autograd.offload import LEAST_BYTES
from zbpp.autograd.storages import storages_of, tensors_inside
from zbpp.autograd.weight_grads import WeightGrads


class _Away(NamedTuple):
    """A storage, its size on the device, and its place outside."""

    storage: UntypedStorage
    nbytes: int
    space: Any


class DeferredTensors:
    """What one microbatch's W will read, and where that is. nbytes: of the storages that leave."""

    def __init__(self, weight_grads: WeightGrads, copier: Copier, *, least_bytes: int = LEAST_BYTES) -> None:
        self._weight_grads, self._copier, self._least_bytes = weight_grads, copier, max(1, least_bytes)
        self._away: list[_Away] = []
        self._leaving: Copy | None = None
        self._arriving: Copy | None = None
        self.nbytes = 0

    def leaving_bytes(self) -> int:
        """Bytes of the storages that may leave."""
        return sum(each.nbytes() for each in self._unshared().values())

    def offload(self, watch: Watch | None = None) -> None:
        """Start to copy all that may leave; nothing, if that is more than the copier may take.

        Raises OffloadError if there is no room for it. watch: see Copier.
        """
        storages = [*self._unshared().values()]
        nbytes = sum(each.nbytes() for each in storages)
        if not storages or not self._copier.has_room(nbytes):
            return
        self.nbytes = nbytes
        for each in storages:
            self._away.append(_Away(each, each.nbytes(), self._copier.space(each.nbytes())))
        self._leaving = self._copier.out([(each.storage, each.space) for each in self._away], watch)

    def drop(self) -> None:
        """Wait until the copies have ended; then free the memory on the device. Raises OffloadError."""
        if self._leaving is None:
            return
        self._leaving.wait()
        self._leaving = None
        unshared = self._unshared()  # somebody may have taken a reference since
        for each in self._away:
            if each.storage._cdata in unshared:
                each.storage.resize_(0)

    def fetch(self, watch: Watch | None = None) -> None:
        """Start to copy all back that is away."""
        away = [each for each in self._away if not each.storage.nbytes()]
        for each in away:
            each.storage.resize_(each.nbytes)
        if away:
            self._arriving = self._copier.back([(each.storage, each.space) for each in away], watch)
        self._give_back()  # the next copy into such a space starts when this copy has ended

    def wait(self) -> None:
        """Wait until all is back. Raises OffloadError."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def abandon(self) -> None:
        """Give up what is away. W can't follow."""
        for copy in (self._leaving, self._arriving):
            if copy is not None:  # it reads or writes memory that is freed now
                with suppress(OffloadError):
                    copy.wait()
        self._leaving = self._arriving = None
        self._give_back()

    def _give_back(self) -> None:
        for each in self._away:
            self._copier.give_back(each.space, each.nbytes)
        self._away.clear()

    def _unshared(self) -> dict[int, UntypedStorage]:
        """By address, the storages that only the tensors of W use, and that are large enough to leave."""
        # All tensors are alive until the end: a tensor made for this call, and freed, would not be counted.
        tensors = {id(each): each for each in self._tensors()}
        found: dict[int, UntypedStorage] = {}
        users: dict[int, int] = {}
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
            users[storage._cdata] = users.get(storage._cdata, 0) + 1
        leaves = {each._cdata for leaf in self._weight_grads.leaves() for each in storages_of(leaf)}
        return {
            address: storage
            for address, storage in found.items()
            if address not in leaves
            and storage.nbytes() >= self._least_bytes
            and storage.device == self._copier.device
            and storage.resizable()
            and _num_users(storage) == users[address] + 1  # the Python object `storage` is a user, too
        }

    def _tensors(self) -> Iterator[Tensor]:
        """The tensors that W will read; of a DTensor or a sparse tensor, those inside."""
        return (part for tensor in self._weight_grads.tensors() for part in tensors_inside(tensor))


def _num_users(storage: UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
