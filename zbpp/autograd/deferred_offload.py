"""Offload of the tensors that B keeps for W (each site's x and dy), from the end of B until W.

    deferred = DeferredTensors(weight_grads, copier)    # after B
    deferred.offload()              # start to copy: device -> host
    deferred.drop()                 # wait for the copies, then free the device memory
    deferred.fetch()                # start to copy: host -> device
    deferred.wait()                 # now W may read the tensors
    weight_grads.accumulate()       # W: the same call as without offload

A STORAGE leaves if only tensors that W will read use it: then nobody reads its content before W. So the
storage itself gives up its memory (`resize_`), and gets new memory for the copy back; the tensors over the
storage stay the same objects, with their version counters. A storage with other users stays, since offloading
it would free nothing: a received message in the pool, a gradient that is being sent, a tensor that the caller
or a hook holds.
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
    """A storage that leaves, its size on the device, and its space outside the device."""

    storage: UntypedStorage
    nbytes: int
    space: Any


class DeferredTensors:
    """The tensors that one microbatch's W will read: moves their storages out of the device and back.

    nbytes: the bytes of the storages that `offload` has copied out.
    """

    def __init__(self, weight_grads: WeightGrads, copier: Copier, *, least_bytes: int = LEAST_BYTES) -> None:
        self._weight_grads, self._copier, self._least_bytes = weight_grads, copier, max(1, least_bytes)
        self._away: list[_Away] = []
        self._leaving: Copy | None = None
        self._arriving: Copy | None = None
        self.nbytes = 0

    def leaving_bytes(self) -> int:
        """The bytes of the storages that may leave."""
        return sum(each.nbytes() for each in self._unshared().values())

    def offload(self, watch: Watch | None = None) -> None:
        """Start to copy out all storages that may leave; none, if together they exceed the copier's limit.

        Raises OffloadError if there is no memory outside the device for them. watch: see `Watch`.
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
        """Wait until the copies out have ended; then free the device memory. Raises OffloadError."""
        if self._leaving is None:
            return
        self._leaving.wait()
        self._leaving = None
        unshared = self._unshared()  # again: a storage may have got another user since `offload`
        for each in self._away:
            if each.storage._cdata in unshared:
                each.storage.resize_(0)

    def fetch(self, watch: Watch | None = None) -> None:
        """Start to copy back all storages that are away."""
        away = [each for each in self._away if not each.storage.nbytes()]
        for each in away:
            each.storage.resize_(each.nbytes)
        if away:
            self._arriving = self._copier.back([(each.storage, each.space) for each in away], watch)
        self._give_back()  # safe: a later copy into these spaces starts after this copy's end

    def wait(self) -> None:
        """Wait until all storages are back. Raises OffloadError."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def abandon(self) -> None:
        """Give up the content of the storages that are away, after a failed step. No W may follow."""
        for copy in (self._leaving, self._arriving):
            if copy is not None:  # the copy reads or writes memory that is about to be freed
                with suppress(OffloadError):
                    copy.wait()
        self._leaving = self._arriving = None
        self._give_back()

    def _give_back(self) -> None:
        for each in self._away:
            self._copier.give_back(each.space, each.nbytes)
        self._away.clear()

    def _unshared(self) -> dict[int, UntypedStorage]:
        """{address: storage} of the storages that may leave: large enough, and used by W's tensors alone."""
        # Keep all tensors alive until the users are counted: a tensor may exist for this call only.
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
        """The tensors that W will read; for a DTensor or a sparse tensor, the tensors inside it."""
        return (part for tensor in self._weight_grads.tensors() for part in tensors_inside(tensor))


def _num_users(storage: UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
