"""Activations that leave device memory after F and come back before B.

    activations = SavedActivations(copier)
    activations.keep(module.parameters())
    with activations.saving():          # F: saved-tensor hooks pack each tensor that autograd saves
        output = module(x)
    activations.offload()               # start to copy: device -> host
    activations.drop()                  # wait for the copies, then free the device memory
    activations.fetch()                 # start to copy: host -> device
    backward_input(output, ...)         # B, then W: the same calls as without offload

A STORAGE leaves, not a tensor: several saved tensors are often views of one storage, which is copied once.
Each saved tensor is packed as a SavedTensor, which knows its view of the storage. The split keeps a site's x
packed (capture.py) and W unpacks it: B and W run the same kernels on the same numbers as without offload.

These stay: parameters and buffers, tensors that the caller holds anyway, storages below `least_bytes`,
tensors of a subclass such as DTensor, and all tensors in forward mode (jvp). A tensor that stays is packed
as a Stays.

Autograd raises an error if a saved tensor was changed in place, but does not check a packed tensor. So the
packed tensor notes the saved tensor's count of in-place changes (`_version`), and unpacking raises an error
if that count has grown.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from zbpp.autograd.capture import PackedTensor, unpack
from zbpp.autograd.offload.host_copier import Copier, Copy, Moves, Watch, bytes_of
from zbpp.autograd.storages import storages_of

LEAST_BYTES = 64 * 1024
"""Storages below this size stay: a copy of so few bytes takes longer to start than to run."""


class _Memory:
    """A storage that saved tensors are views of, on the device or away.

    content: a tensor over the whole storage on the device; None while the storage is away. host: the host
    memory that has the bytes, or that they are being copied to. leaving: the copy that reads `content`;
    arriving: the copy that fills `content`.

    `content` is a tensor because users of a storage are counted: a BufferPool gives a buffer out again when
    nothing else uses its storage. Each tensor counts as a user. Each reference to an UntypedStorage does not:
    all refer to the same Python object.
    """

    __slots__ = ("__weakref__", "arriving", "content", "copier", "host", "leaving", "nbytes")

    def __init__(self, content: UntypedStorage, copier: Copier) -> None:
        self.content: Tensor | None = bytes_of(content)
        self.nbytes, self.copier = content.nbytes(), copier
        self.host: Tensor | None = None
        self.leaving: Copy | None = None
        self.arriving: Copy | None = None

    def present(self) -> UntypedStorage:
        """The storage on the device; fetches it now if it is away and no copy back was started."""
        if self.content is None:
            start_fetch([self])
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
        assert self.content is not None
        return self.content.untyped_storage()

    def free_host(self) -> None:
        """Give the host memory back."""
        if self.host is not None:
            self.copier.give_back(self.host)
            self.host = None

    def __del__(self) -> None:
        for copy in (self.leaving, self.arriving):
            if copy is not None:
                copy.wait()
        self.free_host()


def start_fetch(memories: Iterable[_Memory], watch: Watch | None = None) -> Copy | None:
    """Start to copy back the memories that are away. Returns this copy; None if no memory is away."""
    away = [each for each in memories if each.content is None]
    for each in memories:
        if each.content is not None:
            each.free_host()
    if not away:
        return None
    copier = away[0].copier
    for each in away:
        each.content = bytes_of(copier.new_storage(each.nbytes))
    copy = copier.back(_moves(away), watch)
    for each in away:
        each.arriving = copy
        each.free_host()  # safe: a later copy into this memory starts after this copy's end
    return copy


def _moves(memories: Iterable[_Memory]) -> Moves:
    return [
        (each.content.untyped_storage(), each.host)
        for each in memories
        if each.content is not None and each.host is not None
    ]


class _Watched:
    """A packed tensor that notices whether the saved tensor was changed in place.

    _tensor: a detached alias, which shares the saved tensor's version counter.
    """

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
                f"{self._saved_version} instead; clone the tensor before you change it"
            )


class Stays(_Watched):
    """A saved tensor that does not leave."""

    __slots__ = ()
    stays = True

    def unpack(self) -> Tensor:
        """The tensor."""
        self.check()
        return self._tensor

    def tensors(self) -> Iterator[Tensor]:
        """The tensor."""
        yield self._tensor


class SavedTensor(_Watched):
    """A saved tensor whose storage may be away: a view of a _Memory."""

    __slots__ = ("_memory", "_view")
    stays = False

    def __init__(self, tensor: Tensor, memory: _Memory) -> None:
        super().__init__(tensor)
        self._memory = memory
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        # Only the alias's version counter is needed: without this line the alias would hold the storage.
        self._tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def unpack(self) -> Tensor:
        """The tensor on the device; waits for the copy back."""
        self.check()
        return self._tensor.new_empty(0).set_(self._memory.present(), *self._view)

    def tensors(self) -> Iterator[Tensor]:
        """A tensor over the whole storage if it is on the device, else nothing.

        The saved tensors of one storage share this tensor, and use the storage through no other tensor.
        """
        if self._memory.content is not None:
            yield self._memory.content


class SavedActivations:
    """The storages that autograd saves in one forward: moves them out of the device and back.

    It keeps no storage alive: when autograd drops a saved tensor, its memory is freed.
    """

    def __init__(self, copier: Copier, *, least_bytes: int = LEAST_BYTES) -> None:
        self._copier, self._least_bytes = copier, max(1, least_bytes)
        # {address: storage}. These storages are held while tensors are packed: otherwise one of them could be
        # freed, and a new storage could get its address.
        self._stays: dict[int, UntypedStorage] = {}
        self._memories: dict[int, weakref.ref[_Memory]] = {}  # by the address of the storage
        self._leaving: Copy | None = None
        self._arriving: Copy | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, autograd's saved tensors are packed, so that they may leave later."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._stays.clear()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the storages of these tensors on the device. Called before `saving`."""
        for tensor in tensors:
            self._stays.update((storage._cdata, storage) for storage in storages_of(tensor))

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Keep the storages of these tensors on the device, too. Called between `saving` and `offload`."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._memories.pop(storage._cdata, None)

    @property
    def nbytes(self) -> int:
        """The bytes of the storages that may leave."""
        return sum(memory.nbytes for memory in self._living())

    def offload(self, watch: Watch | None = None) -> None:
        """Start to copy out all storages that may leave. watch: see `Watch`."""
        leaving = [each for each in self._living() if each.content is not None and each.host is None]
        for each in leaving:
            each.host = self._copier.host_memory(each.nbytes)
        if leaving:
            self._leaving = self._copier.out(_moves(leaving), watch)
            for each in leaving:
                each.leaving = self._leaving

    def drop(self) -> None:
        """Wait until the copies out have ended; then free the device memory."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
            for each in self._living():
                each.leaving = None
                if each.host is not None:
                    each.content = None

    def fetch(self, watch: Watch | None = None) -> None:
        """Start to copy back all storages that are away. Unpacking waits for the copy."""
        self._arriving = start_fetch([*self._living()], watch)

    def wait(self) -> None:
        """Wait until all storages are back."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            for each in self._living():
                each.arriving = None

    def _living(self) -> Iterator[_Memory]:
        return (memory for each in self._memories.values() if (memory := each()) is not None)

    def _pack(self, tensor: Tensor) -> PackedTensor:
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
        # In forward mode (jvp) every tensor stays: it may hold a tangent, which a copy would lose.
        is_plain = type(tensor) is Tensor and forward_ad._current_level < 0
        return is_plain and tensor.device == self._copier.device and may_leave(tensor)


def may_leave(tensor: Tensor) -> bool:
    """Whether a tensor is dense, and neither a leaf that requires gradients nor a view of a parameter.

    False also for conjugate, negative and quantized tensors.
    """
    return (
        tensor.layout is torch.strided
        and not (tensor.is_leaf and tensor.requires_grad)
        and not isinstance(tensor._base, nn.Parameter)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )
