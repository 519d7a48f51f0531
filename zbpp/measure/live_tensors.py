"""The bytes of live tensors at any moment: by CUDA's allocator, or counted without an allocator's help.

`counter_of` a device: AllocatedBytes for a GPU, else LiveTensors, a dispatch mode. LiveTensors sees the
tensors that every operator returns, and counts each storage once, until it is freed. So it works on the CPU,
whose allocator has no counter, and on fake tensors, which have no memory. It does not see the memory that an
operator allocates for itself and frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpp import devices
from zbpp.autograd.storages import storages_of


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors made inside the with block, and of those given to `count`.

    Tensors from before the with block are not counted, and neither are their views.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        # {address: (storage, bytes counted for it)}; None for a storage that is not counted.
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int | None]] = {}
        self._bytes = self._highest = 0

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # which fake tensors ask often
            return func(*args)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self._see(storages_of(each), counted=False)
            elif isinstance(each, torch.UntypedStorage):  # of set_
                self._see([each], counted=False)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._see(storages_of(each), counted=True)
        return result

    @property
    def now(self) -> int:
        """The bytes alive now. A resized storage counts with its new size, also after it was empty."""
        for address, (storage, counted) in list(self._seen.items()):
            found = storage()
            if counted is not None and found is not None and found.nbytes() != counted:
                self._bytes += found.nbytes() - counted
                self._seen[address] = storage, found.nbytes()
        return self._bytes

    @property
    def highest(self) -> int:
        """The most bytes that were alive at a time since `mark`."""
        return max(self._highest, self.now)

    def mark(self) -> int:
        """Start `highest` anew from the bytes alive now, and return these."""
        self._highest = self.now
        return self._highest

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors, though they are from before the with block."""
        for tensor in tensors:
            self.forget(tensor)
            self._see(storages_of(tensor), counted=True)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count these tensors."""
        for tensor in tensors:
            self.forget(tensor)
            self._see(storages_of(tensor), counted=False)

    def forget(self, tensor: Tensor) -> None:
        """Stop counting the tensor's storages."""
        for storage in storages_of(tensor):
            self._drop(storage._cdata)

    def alive(self) -> list[torch.UntypedStorage]:
        """The storages that are counted now."""
        found = (storage() for storage, counted in list(self._seen.values()) if counted is not None)
        return [each for each in found if each is not None]

    def _see(self, storages: Iterable[torch.UntypedStorage], *, counted: bool) -> None:
        for storage in storages:
            address = storage._cdata
            if address in self._seen:
                continue
            size = storage.nbytes() if counted else None
            dropped = weakref.ref(storage, lambda _, address=address: self._drop(address))  # type: ignore[misc]  # mypy reads no default
            self._seen[address] = dropped, size
            self._bytes += size or 0
            self._highest = max(self._highest, self._bytes)

    def _drop(self, address: int) -> None:
        _, counted = self._seen.pop(address, (None, None))
        self._bytes -= counted or 0


class AllocatedBytes:
    """What the device's own allocator counts, with the methods of LiveTensors: it counts all tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def now(self) -> int:
        """The bytes alive now."""
        return devices.allocated_bytes(self._device)

    @property
    def highest(self) -> int:
        """The most bytes that were alive at a time since `mark`."""
        return devices.highest_allocated_bytes(self._device)

    def mark(self) -> int:
        """Start `highest` anew from the bytes alive now, and return these."""
        devices.forget_highest(self._device)
        return self.now

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do."""

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: host memory is not the allocator's."""


Counter = LiveTensors | AllocatedBytes


def counter_of(device: torch.device) -> Counter:
    """What counts the live bytes on a device; to be entered."""
    return AllocatedBytes(device) if devices.is_accelerator(device) else LiveTensors()


class Level(NamedTuple):
    """Bytes of live tensors beyond those before a run: the most during it, and those left after it."""

    highest: int
    after: int


def live_bytes(run: Callable[[], object], device: torch.device) -> Level:
    """Call `run` and measure the live tensors on `device`, which slows it down.

    On the CPU, a tensor that was allocated before measuring began is not counted when it is freed.
    """
    with counter_of(device) as counter:
        before = counter.mark()
        run()
        return Level(counter.highest - before, counter.now - before)
