"""Offload of activations in one stage: executes the program's Offload, Drop, Fetch and Await.

    Offload saved(0,3)    saved.offload(3)    start to copy out
    Drop saved(0,3)       saved.drop(3)       wait for the copy, free the device memory
    Fetch saved(0,3)      saved.fetch(3)      start to copy back
    Await saved(0,3)      saved.wait(3)       wait for the copy

`saved` is the stage's SavedOffload, for the tensors that F keeps for B. Where the program offloads the
activations of a microbatch, `SavedOffload.forward` runs its F; any other F runs as without offload. A
DeferredOffload does the same for the tensors that B keeps for W.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.autograd.copies import Copier, Watch
from zbpp.autograd.deferred_offload import DeferredTensors
from zbpp.autograd.offload import SavedActivations
from zbpp.runtime.layout import Message
from zbpp.runtime.stage import StageWorker


class _Leavable(Protocol):
    """The tensors of one microbatch that leave: SavedActivations or DeferredTensors."""

    @property
    def nbytes(self) -> int: ...
    def offload(self, watch: Watch | None = None) -> None: ...
    def drop(self) -> None: ...
    def fetch(self, watch: Watch | None = None) -> None: ...
    def wait(self) -> None: ...


_Held = TypeVar("_Held", bound=_Leavable)


class StageOffload(ABC, Generic[_Held]):
    """Offload of one kind of value ("saved" or "deferred") in one stage, for all microbatches.

    nbytes: the most bytes that left of one microbatch so far.
    """

    name: str  # of the values: "saved" or "deferred"

    def __init__(self, worker: StageWorker, copier: Copier, least_bytes: int) -> None:
        self._worker, self._copier, self._least_bytes = worker, copier, least_bytes
        self._held: dict[int, _Held] = {}
        self.nbytes = 0

    def offload(self, microbatch: int, watch: Watch | None = None) -> None:
        """Start to copy out what the stage holds of the microbatch. watch: see `Watch`."""
        held = self._of(microbatch)
        held.offload(watch)
        self.nbytes = max(self.nbytes, held.nbytes)

    def drop(self, microbatch: int) -> None:
        """Wait until the copy out has ended; then free the device memory."""
        self._held[microbatch].drop()

    def fetch(self, microbatch: int, watch: Watch | None = None) -> None:
        """Start to copy back. watch: see `Watch`."""
        self._held[microbatch].fetch(watch)

    def wait(self, microbatch: int) -> None:
        """Wait until the microbatch's tensors are back. From here on the StageWorker alone holds them."""
        self._held.pop(microbatch).wait()

    def end(self) -> None:
        """Raise RuntimeError if an offloaded value has had no Await by the end of a call."""
        if self._held:
            left = [f"{self.name}({self._worker.index},{microbatch})" for microbatch in self._held]
            raise RuntimeError(f"a call ended with offloaded values left over: {', '.join(left)}")

    @abstractmethod
    def abandon(self) -> None:
        """Drop the tensors that a failed step has left."""

    @abstractmethod
    def _of(self, microbatch: int) -> _Held:
        """The microbatch's tensors that may leave."""


class SavedOffload(StageOffload[SavedActivations]):
    """Offload of the tensors that F keeps for B."""

    name = "saved"

    def forward(self, microbatch: int, message: Message) -> Message:
        """Run F so that the tensors that it saves may leave."""
        activations = SavedActivations(self._copier, least_bytes=self._least_bytes)
        activations.keep(self._stays(microbatch))
        with activations.saving():
            result = self._worker.forward(microbatch, message)
        # Others hold a message, too: the pool of receive buffers, a send, the next stage on this rank. To
        # offload a message would free no memory, and the copy back would be a second copy of it.
        activations.leave_out(each for each in (*message, *result) if each is not None)
        self._held[microbatch] = activations
        return result

    def abandon(self) -> None:
        """Drop the tensors that a failed step has left."""
        self._held.clear()

    def _of(self, microbatch: int) -> SavedActivations:
        return self._held[microbatch]

    def _stays(self, microbatch: int) -> Iterator[Tensor]:
        """Tensors that others hold anyway: weights, buffers, and what the caller gave for the microbatch."""
        for module in (self._worker.module, self._worker.loss_fn):
            if isinstance(module, nn.Module):
                yield from module.parameters()
                yield from module.buffers()
        for each in tree_leaves(self._worker.given(microbatch)):
            if isinstance(each, Tensor):
                yield each


class DeferredOffload(StageOffload[DeferredTensors]):
    """Offload of the tensors that B keeps for W: each site's x and dy, except those that others hold, too."""

    name = "deferred"

    def abandon(self) -> None:
        """Drop the tensors that a failed step has left."""
        for each in self._held.values():
            each.abandon()
        self._held.clear()

    def _of(self, microbatch: int) -> DeferredTensors:
        weight_grads = self._worker.deferred(microbatch)
        held = DeferredTensors(weight_grads, self._copier, least_bytes=self._least_bytes)
        self._held[microbatch] = held
        return held
