"""Weights that live in host memory, and are copied to the device block by block, for F and for B.

    OffloadedWeights(stages, device)    once, before the Pipeline and the optimizer are made

    F   While a block's forward runs, its weights are in a device buffer, and the weights of the next block
        are copied to another buffer. After the forward, the weights that autograd has saved (a linear layer
        needs its weight for dx) are packed as views without memory.
    B   When autograd unpacks such a view, the block's weights are copied to a buffer again, and the copy of
        the previous block starts.
    W   Block by block: the block's gradients are copied to the device, W adds to them, and they are copied
        back to the host.

At all other times, and whenever the caller looks, a parameter and its `.grad` are in host memory. So the
optimizer updates on the host, and its states are there. The device holds two buffers of the largest block's
size for weights, and during a W the gradients of one block, whatever the number of blocks. A larger budget
gives more buffers: with one per block, the weights are copied once a step.

A parameter stays the same object: only `parameter.data` changes between host and device memory. Nothing may
refer to a block's device memory after its forward. OffloadedWeights checks this by the number of references
to the buffer's storage.

On a GPU a call starts copies from and to host memory and goes on. The host waits for them once, at the end of
the call: from there on the caller may read gradients and change weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.autograd import WeightGrads, auxiliary_loss, auxiliary_losses
from zbpp.autograd.models.recompute import recomputed, recomputing_by
from zbpp.runtime.call import Call, Result
from zbpp.runtime.extra import Extra, bring, brought_by
from zbpp.runtime.memory import weight_buffers
from zbpp.runtime.memory.offloaded_gradients import OffloadedGradients
from zbpp.runtime.memory.saved_weights import nodes_of, pack_views
from zbpp.runtime.memory.weight_blocks import (
    Block,
    check_stages,
    find_blocks,
    move_buffers,
    raise_held,
    refuse_hooks,
    refuse_shared,
)
from zbpp.runtime.memory.weight_buffers import (
    DeviceBuffers,
    OffloadError,
    View,
    num_buffers,
)

if TYPE_CHECKING:
    from zbpp.runtime.rank import Rank


class OffloadedWeights(Extra):
    """Moves the weights of stages to host memory, and replaces the forward of each block.

    A Pipeline finds it by the stages, and takes it as an extra.

    A block's forward then copies the block's weights to the device when it runs. A block is a child of a
    stage; a stage without children is one block.

    stages: on the CPU, or on the device; their module buffers move to `device`. budget: how many bytes of the
    device the weights and their gradients may take; as many device buffers are made as fit, and weights that
    are still in a buffer are not copied again. None: two buffers, the least.

    Raises ValueError for stages that can't be offloaded, and for a budget that is too small, with the least
    budget that is enough. Raises OffloadError if the host has no room.
    """

    name = "weight_offload"

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        device: torch.device | str | None = None,
        *,
        budget: float | None = None,
    ) -> None:
        check_stages(stages)
        self.device = torch.device(device or "cpu")
        if self.device.type == "meta":
            raise ValueError("device=meta has no memory for weights: write cpu, or a GPU such as cuda:0")
        self._is_in_call = False
        self._waits = True  # whether copies are waited for at once
        blocks = [find_blocks(index, stage) for index, stage in sorted(stages.items())]
        self._blocks = [block for some in blocks for block in some]
        refuse_shared(self._blocks)
        largest = max((block.piece.nbytes for block in self._blocks), default=0)
        number = num_buffers(budget, largest, len(self._blocks))
        # All host memory is allocated before any block moves: without room, the stages stay as they are.
        homes = [self._empty(block.piece.nbytes) for block in self._blocks]
        for block, home in zip(self._blocks, homes, strict=True):
            block.move_to(home)
        self._buffers = DeviceBuffers(largest, self.device, number)
        self._largest = largest
        self._gradients = OffloadedGradients(self._blocks, self._buffers, self.device, self._empty)
        self._running: Block | None = None  # the block whose forward runs
        for some in blocks:
            for block, following in pairwise(some):
                block.beside[1], following.beside[-1] = following, block
            for block in some:
                block.module.forward = _OnDevice(self, block)
        bring(self, stages.values())
        for stage in stages.values():
            move_buffers(stage, self.device)

    @property
    def device_bytes(self) -> int:
        """The most bytes on the device: the buffers, and during a W the gradients of the largest block."""
        return self._buffers.nbytes + self._largest

    @property
    def host_bytes(self) -> int:
        """The bytes of the weights on the host. Gradients take as many again, from the first W on."""
        return sum(block.piece.nbytes for block in self._blocks)

    @property
    def num_copies(self) -> int:
        """How many times a block's weights have been copied to the device."""
        return self._buffers.num_copies

    def on_device(self) -> list[Tensor]:
        """The memory of the device's buffers."""
        return self._buffers.memory()

    def on_host(self) -> Iterator[Tensor]:
        """The host memory of weights and gradients."""
        for block in self._blocks:
            yield from (block.host, block.grads)

    def attach(self, rank: Rank) -> None:
        """See Extra. Raises ValueError for ties, a mesh or a replaced forward."""
        if any(isinstance(each, OffloadedWeights) for each in rank.extras):
            refusal = (
                "this rank's stages have several OffloadedWeights: give all stages of a rank to a single one"
            )
        elif rank.ties:
            refusal = "stages with offloaded weights can't have tied parameters: untie them"
        elif rank.place.mesh is not None:
            refusal = "a pipeline with a mesh can't have offloaded weights: leave the mesh out"
        else:
            refusal = self.replaced()
        if refusal:
            raise ValueError(refusal)
        for worker in rank.workers.values():
            worker.run_w = self.run_w

    def replaced(self) -> str:
        """A sentence about a block whose forward was replaced after OffloadedWeights; "" if none was.

        Such a forward would find the weights on the host.
        """
        for block in self._blocks:
            if not isinstance(recomputed(vars(block.module).get("forward")), _OnDevice):
                return (
                    f"the forward of {block.name} was replaced (compiled?) after its weights were offloaded: "
                    "only zbpp.autograd.recompute may wrap it after OffloadedWeights"
                )
        return ""

    def begin(self, call: Call) -> None:
        """Take up what the caller has changed in the weights.

        Raises RuntimeError for hooks on weights, and for a weight that got another shape or dtype.
        """
        self._is_in_call, self._waits = True, False
        self._buffers.forget()
        for block in self._blocks:
            refuse_hooks(block)
            block.take_in()

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        self._end()

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._end()

    def _end(self) -> None:
        """From here on the caller may change weights, also through `.data`."""
        self._is_in_call, self._waits = False, True
        self._buffers.finish()
        self._gradients.finish()

    def run_w(self, microbatch: int, weight_grads: WeightGrads) -> None:
        """W of a microbatch."""
        self.accumulate(weight_grads)

    def _load(self, block: Block, direction: int) -> Tensor:
        """The device memory with a block's weights; the copy of the next or previous block starts."""
        memory = self._buffers.load(block)
        self._buffers.prefetch(block.neighbours(direction))
        if self._waits:  # outside of a call nobody says when the caller may change weights again
            self._buffers.finish()
        return memory

    def accumulate(self, weight_grads: WeightGrads) -> None:
        """Run W as `weight_grads.accumulate()` does, but block by block; the gradients end on the host."""
        self._gradients.accumulate(weight_grads, waits=self._waits)

    def run(self, block: Block, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block's forward with the block's weights on the device."""
        if self._running is not None:
            raise RuntimeError(
                f"{block.name} is called within the forward of {self._running.name}, and the weights of both "
                "would be needed at the same time: make the two one block, that is, one child of the stage"
            )
        self._running = block
        try:
            return self._run(block, forward, args, kwargs)
        finally:
            self._running = None

    def _run(self, block: Block, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._is_in_call:  # the caller calls the stage outside of a step: `begin` has not run
            self._buffers.forget()
            block.take_in()
        version = block.version()
        memory = self._load(block, 1)
        references = _references(memory)
        # Found before the forward, which may change its input in place.
        below = nodes_of(tree_leaves([args, kwargs]))
        rerun = partial(self._rerun, block)
        with block.in_memory(memory), auxiliary_losses() as found, recomputing_by(rerun):
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled():  # while the parameters are in `memory`: a node may save a parameter
                self._pack(block, memory, tree_leaves([output, *found.values()]), below)
        if block.version() != version:
            raise RuntimeError(
                f"the forward of {block.name} changes a weight in place, and the change would be lost: make "
                "the weight a module buffer, or do not offload weights"
            )
        if _references(memory) > references and gc.collect() >= 0 and _references(memory) > references:
            raise_held(block)
        for name, value in found.items():
            auxiliary_loss(name, value)
        return output

    def _rerun(self, block: Block, forward: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run a checkpoint inside a block's forward again, in B, with the block's weights on the device."""
        memory = self._load(block, -1)
        with block.in_memory(memory), recomputing_by(partial(self._rerun, block)):
            outputs = forward()
            self._pack(block, memory, tree_leaves(outputs), [])
        return outputs

    def _empty(self, nbytes: int) -> Tensor:
        """Memory outside the device. Raises OffloadError if there is no room."""
        try:
            return weight_buffers.host_memory(nbytes, self.device)
        except (RuntimeError, MemoryError, OSError) as error:
            raise OffloadError(
                f"no room for {nbytes} more bytes of offloaded weights or gradients: use more ranks: {error}"
            ) from error

    def _pack(self, block: Block, memory: Tensor, outputs: list[Any], below: list[Any]) -> None:
        """Pack the weights of the block that autograd has saved, as views without memory.

        below: the nodes that computed the block's inputs.
        """
        version = block.version()

        def unpack(view: View) -> Tensor:
            if block.version() != version:
                raise RuntimeError(
                    f"a weight of {block.name} was changed in place between F and B, but B needs the values "
                    "that F used: let the optimizer step after the last backward"
                )
            return view.of(self._load(block, -1))

        pack_views(outputs, below, memory, unpack)

    def __reduce__(self) -> NoReturn:
        raise TypeError("stages with offloaded weights can't be copied: copy them before OffloadedWeights")


class _OnDevice:
    """Replaces a block's forward: runs it with the block's weights on the device."""

    def __init__(self, weights: OffloadedWeights, block: Block) -> None:
        self._weights, self._block = weights, block
        self.module = block.module  # a recompute looks for the modules that a forward uses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._block.module
        forward = MethodType(type(module).forward, module)
        return self._weights.run(self._block, forward, args, kwargs)


def offloaded_weights(stages: Iterable[nn.Module]) -> OffloadedWeights | None:
    """The OffloadedWeights of these stages; None if they have none."""
    return next((each for each in brought_by(stages) if isinstance(each, OffloadedWeights)), None)


def _references(memory: Tensor) -> int:
    """The number of references to the storage of this memory."""
    count: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return count
