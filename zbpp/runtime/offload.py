"""Activations that leave a stage's device memory between two actions: the program says which, and when.

    Offload saved(0,3)    stage.offload(3)    start to copy out
    Drop saved(0,3)       stage.drop(3)       wait for the copy, free the device memory
    Fetch saved(0,3)      stage.fetch(3)      start to copy back
    Await saved(0,3)      stage.wait(3)       wait for the copy

An F whose activations leave runs as `StageOffload.forward`; any other F runs as without offload.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.autograd.copies import Copier
from zbpp.autograd.offload import SavedActivations
from zbpp.runtime.layout import Message
from zbpp.runtime.stage import StageWorker


class StageOffload:
    """What one stage's F's have saved, while B has not been awaited.

    nbytes: the most that left of a microbatch.
    """

    def __init__(self, worker: StageWorker, copier: Copier, least_bytes: int) -> None:
        self._worker, self._copier, self._least_bytes = worker, copier, least_bytes
        self._activations: dict[int, SavedActivations] = {}
        self.nbytes = 0

    def forward(self, microbatch: int, message: Message) -> Message:
        """F: what it saves may leave."""
        activations = SavedActivations(self._copier, least_bytes=self._least_bytes)
        activations.keep(self._stays(microbatch))
        with activations.saving():
            result = self._worker.forward(microbatch, message)
        # A message is held by others, too: by the pool of receive buffers, by a send, by the next stage here.
        # If it left, it would not be freed, and come back as a second copy.
        activations.leave_out(each for each in (*message, *result) if each is not None)
        self._activations[microbatch] = activations
        return result

    def offload(self, microbatch: int) -> None:
        """Start to copy out what F of the microbatch has saved."""
        activations = self._activations[microbatch]
        self.nbytes = max(self.nbytes, activations.nbytes)
        activations.offload()

    def drop(self, microbatch: int) -> None:
        """Free the device memory, once it is copied."""
        self._activations[microbatch].drop()

    def fetch(self, microbatch: int) -> None:
        """Start to copy back."""
        self._activations[microbatch].fetch()

    def wait(self, microbatch: int) -> None:
        """Wait until all is back. From here on only the graph holds what was saved, and B frees it."""
        self._activations.pop(microbatch).wait()

    def end(self) -> None:
        """Raise RuntimeError if a call left anything over."""
        if self._activations:
            left = [f"saved({self._worker.index},{microbatch})" for microbatch in self._activations]
            raise RuntimeError(f"a call ended with activations left over: {', '.join(left)}")

    def abandon(self) -> None:
        """Drop the activations that a failed step has left."""
        self._activations.clear()

    def _stays(self, microbatch: int) -> Iterator[Tensor]:
        """Tensors that somebody holds anyway: weights, buffers, and what the caller gave."""
        for module in (self._worker.module, self._worker.loss_fn):
            if isinstance(module, nn.Module):
                yield from module.parameters()
                yield from module.buffers()
        for each in tree_leaves(self._worker.given(microbatch)):
            if isinstance(each, Tensor):
                yield each
