"""Activations that leave device memory after F and come back before B.

    activations = SavedActivations(copier)
    activations.keep(module.parameters())
    with activations.saving():          # F: whatever autograd saves is packed
        output = module(x)
    activations.offload()               # start to copy: device -> host
    activations.drop()                  # the copies have ended: device memory is freed
    activations.fetch()                 # start to copy: host -> device
    backward_input(output, ...)         # B, then W: as without

What leaves is a STORAGE: the tensors that autograd saves are often views of one, and it leaves once. Each
saved tensor is packed as a SavedTensor, which knows its view of the storage. The split keeps a site's x
packed (rules.py) and W unpacks it: B and W run the same kernels on the same numbers as without offload.

What stays: parameters and buffers, tensors that the caller holds anyway, storages below `least_bytes`, and
tensors of subclasses, such as DTensor. Those are packed as Stays.

Autograd checks that a saved tensor is unchanged, but not that of a packed one. So a packed tensor keeps the
count of in-place changes (`_version`) of the tensor that was saved, and unpacking compares.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from zbpp.autograd.copies import Copier, Copy, Watch
from zbpp.autograd.storages import storages_of

LEAST_BYTES = 64 * 1024
"""Smaller storages stay: a copy of one takes longer to start than to run."""


class _Memory:
    """A storage that many saved tensors may be views of.

    content: on the device; None while it is away. space: where it is, or is being copied to.
    arriving: the copy that fills `content`.
    """

    __slots__ = ("__weakref__", "arriving", "content", "copier", "nbytes", "space")

    def __init__(self, content: UntypedStorage, copier: Copier) -> None:
        self.content: UntypedStorage | None = content
        self.nbytes, self.copier = content.nbytes(), copier
        self.space: Any = None
        self.arriving: Copy | None = None

    def present(self) -> UntypedStorage:
        """The storage on the device; comes back now if nobody has fetched it."""
        if self.content is None:
            start_fetch([self])
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
        assert self.content is not None
        if self.content.nbytes() != self.nbytes:  # W's, see deferred_offload.py
            raise RuntimeError("a saved tensor is read while it is away: only W may read it after B")
        return self.content

    def free_space(self) -> None:
        if self.space is not None:
            self.copier.give_back(self.space, self.nbytes)
            self.space = None

    def __del__(self) -> None:
        if self.arriving is not None:  # the copy writes into memory that is freed now
            self.arriving.wait()
        self.free_space()


def start_fetch(memories: Iterable[_Memory], watch: Watch | None = None) -> Copy | None:
    """Start to copy back those memories that are away; returns the copy, None if none is."""
    away = [each for each in memories if each.content is None]
    for each in memories:
        if each.content is not None:
            each.free_space()
    if not away:
        return None
    copier = away[0].copier
    for each in away:
        each.content = copier.new_storage(each.nbytes)
    copy = copier.back([(each.content, each.space) for each in away if each.content is not None], watch)
    for each in away:
        each.arriving = copy
        each.free_space()  # the next copy into this space starts when this copy has ended
    return copy


class _Watched:
    """A tensor as autograd saved it. `_tensor` shares its count of in-place changes."""

    __slots__ = ("_saved_version", "_tensor", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._saved_version = tensor.detach(), tensor._version
        self.shape = tensor.shape

    @property
    def _version(self) -> int:
        return self._tensor._version

    def check(self) -> None:
        """Raise RuntimeError if the tensor was changed in place since it was saved."""
        now = self._tensor._version
        if now != self._saved_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(self.shape)} is at version {now}; expected version "
                f"{self._saved_version} instead; clone it before it is changed"
            )


class Stays(_Watched):
    """A saved tensor that does not leave."""

    __slots__ = ()

    def unpack(self) -> Tensor:
        """The tensor."""
        self.check()
        return self._tensor

    def tensors(self) -> Iterator[Tensor]:
        """The tensor, which is held."""
        yield self._tensor


class SavedTensor(_Watched):
    """A saved tensor whose storage may be away: a view of a _Memory."""

    __slots__ = ("_memory", "_view")

    def __init__(self, tensor: Tensor, memory: _Memory) -> None:
        super().__init__(tensor)
        self._memory = memory
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        # The count of changes is all that is needed of the tensor itself.
        self._tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def unpack(self) -> Tensor:
        """The tensor, once it has come back."""
        self.check()
        return self._over(self._memory.present())

    def tensors(self) -> Iterator[Tensor]:
        """The tensor while it is on the device."""
        if self._memory.content is not None:
            yield self._over(self._memory.content)

    def _over(self, storage: UntypedStorage) -> Tensor:
        return self._tensor.new_empty(0).set_(storage, *self._view)


def unpack(packed: Any) -> Tensor:
    """The unpack hook of tensors saved within `SavedActivations.saving`."""
    tensor: Tensor = packed.unpack()
    return tensor


class SavedActivations:
    """What one forward saves for its backward, and where that is.

    Nothing here keeps a storage alive: what autograd drops is free.
    """

    def __init__(self, copier: Copier, *, least_bytes: int = LEAST_BYTES) -> None:
        self._copier, self._least_bytes = copier, max(1, least_bytes)
        # By address. Held while tensors are packed: a storage made later could get the address of one freed.
        self._stays: dict[int, UntypedStorage] = {}
        self._memories: dict[int, weakref.ref[_Memory]] = {}  # by the storage's address
        self._leaving: Copy | None = None
        self._arriving: Copy | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, what autograd saves may leave later."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._stays.clear()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of these tensors stay; called before `saving`."""
        for tensor in tensors:
            self._stays.update((storage._cdata, storage) for storage in storages_of(tensor))

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of these tensors stay after all; called between `saving` and `offload`."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._memories.pop(storage._cdata, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that leave."""
        return sum(memory.nbytes for memory in self._living())

    def offload(self, watch: Watch | None = None) -> None:
        """Start to copy all that may leave; nothing, if that is more than the copier may take.

        Raises OffloadError if there is no room for it. watch: see Copier.
        """
        if not self._copier.has_room(self.nbytes):
            return
        leaving = [each for each in self._living() if each.content is not None and each.space is None]
        for each in leaving:
            each.space = self._copier.space(each.nbytes)
        if leaving:
            self._leaving = self._copier.out(
                [(each.content, each.space) for each in leaving if each.content], watch
            )

    def drop(self) -> None:
        """Wait until the copies have ended; then free the memory on the device. Raises OffloadError."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
            for each in self._living():
                if each.space is not None:
                    each.content = None

    def fetch(self, watch: Watch | None = None) -> None:
        """Start to copy all back that is away. Unpacking waits for it."""
        self._arriving = start_fetch([*self._living()], watch)

    def wait(self) -> None:
        """Wait until all is back. Raises OffloadError."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            for each in self._living():
                each.arriving = None

    def _living(self) -> Iterator[_Memory]:
        return (memory for each in self._memories.values() if (memory := each()) is not None)

    def _pack(self, tensor: Tensor) -> Stays | SavedTensor:
        if not self._may_leave(tensor):
            return Stays(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < self._least_bytes or key in self._stays:
            return Stays(tensor)
        known = self._memories.get(key)
        memory = None if known is None else known()
        if memory is None:
            memory = _Memory(storage, self._copier)
            self._memories[key] = weakref.ref(memory)
        return SavedTensor(tensor, memory)

    def _may_leave(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and tensor.device == self._copier.device and may_leave(tensor)


def may_leave(tensor: Tensor) -> bool:
    """Whether this is a dense tensor, and neither a leaf nor a view of a parameter."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_leaf and tensor.requires_grad)
        and not isinstance(tensor._base, nn.Parameter)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )
