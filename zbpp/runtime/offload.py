"""What a stage holds leaves its device memory between two actions: the program says what, and when.

    Offload saved(0,3)    saved.offload(3)    start to copy out
    Drop saved(0,3)       saved.drop(3)       wait for the copy, free the device memory
    Fetch saved(0,3)      saved.fetch(3)      start to copy back
    Await saved(0,3)      saved.wait(3)       wait for the copy

`saved` is a SavedOffload: what F keeps for B. An F whose activations leave runs as `SavedOffload.forward`;
any other F runs as without offload. A DeferredOffload does the same for what B keeps for W.
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


class _Leaving(Protocol):
    """What leaves of one microbatch."""

    @property
    def nbytes(self) -> int: ...
    def offload(self, watch: Watch | None = None) -> None: ...
    def drop(self) -> None: ...
    def fetch(self, watch: Watch | None = None) -> None: ...
    def wait(self) -> None: ...


_Held = TypeVar("_Held", bound=_Leaving)


class StageOffload(ABC, Generic[_Held]):
    """What leaves of one stage: of each microbatch that is between its Offload and its Await.

    nbytes: the most that left of a microbatch.
    """

    name: str  # of the value that leaves

    def __init__(self, worker: StageWorker, copier: Copier, least_bytes: int) -> None:
        self._worker, self._copier, self._least_bytes = worker, copier, least_bytes
        self._held: dict[int, _Held] = {}
        self.nbytes = 0

    def offload(self, microbatch: int, watch: Watch | None = None) -> None:
        """Start to copy out what the stage holds of the microbatch. watch: see Copier."""
        held = self._of(microbatch)
        held.offload(watch)
        self.nbytes = max(self.nbytes, held.nbytes)

    def drop(self, microbatch: int) -> None:
        """Free the device memory, once it is copied."""
        self._held[microbatch].drop()

    def fetch(self, microbatch: int, watch: Watch | None = None) -> None:
        """Start to copy back. watch: see Copier."""
        self._held[microbatch].fetch(watch)

    def wait(self, microbatch: int) -> None:
        """Wait until all is back. From here on the StageWorker alone holds it."""
        self._held.pop(microbatch).wait()

    def end(self) -> None:
        """Raise RuntimeError if a call left anything over."""
        if self._held:
            left = [f"{self.name}({self._worker.index},{microbatch})" for microbatch in self._held]
            raise RuntimeError(f"a call ended with offloaded values left over: {', '.join(left)}")

    @abstractmethod
    def abandon(self) -> None:
        """Drop what a failed step has left."""

    @abstractmethod
    def _of(self, microbatch: int) -> _Held:
        """What may leave of the microbatch."""


class SavedOffload(StageOffload[SavedActivations]):
    """What F keeps for B."""

    name = "saved"

    def forward(self, microbatch: int, message: Message) -> Message:
        """F: what it saves may leave."""
        activations = SavedActivations(self._copier, least_bytes=self._least_bytes)
        activations.keep(self._stays(microbatch))
        with activations.saving():
            result = self._worker.forward(microbatch, message)
        # A message is held by others, too: by the pool of receive buffers, by a send, by the next stage here.
        # If it left, it would not be freed, and come back as a second copy.
        activations.leave_out(each for each in (*message, *result) if each is not None)
        self._held[microbatch] = activations
        return result

    def abandon(self) -> None:
        """Drop what a failed step has left."""
        self._held.clear()

    def _of(self, microbatch: int) -> SavedActivations:
        return self._held[microbatch]

    def _stays(self, microbatch: int) -> Iterator[Tensor]:
        """Tensors that somebody holds anyway: weights, buffers, and what the caller gave."""
        for module in (self._worker.module, self._worker.loss_fn):
            if isinstance(module, nn.Module):
                yield from module.parameters()
                yield from module.buffers()
        for each in tree_leaves(self._worker.given(microbatch)):
            if isinstance(each, Tensor):
                yield each


class DeferredOffload(StageOffload[DeferredTensors]):
    """What B keeps for W: each site's x and dy, but for those that others hold, too."""

    name = "deferred"

    def abandon(self) -> None:
        """Drop what a failed step has left."""
        for each in self._held.values():
            each.abandon()
        self._held.clear()

    def _of(self, microbatch: int) -> DeferredTensors:
        weight_grads = self._worker.deferred(microbatch)
        held = DeferredTensors(weight_grads, self._copier, least_bytes=self._least_bytes)
        self._held[microbatch] = held
        return held
