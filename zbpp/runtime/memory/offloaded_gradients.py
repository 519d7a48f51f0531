"""W where weights live in host memory: block by block, gradients go to the device and come back.

On a GPU the copies to the host are not waited for, unless the caller says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zbpp.autograd import WeightGrads
from zbpp.runtime.memory.weight_blocks import Block, refuse_hooks
from zbpp.runtime.memory.weight_buffers import DeviceBuffers
from zbpp.streams import Event, streams_of


class OffloadedGradients:
    """The gradients of these blocks, which are on the device only while W adds to them.

    buffers: device memory for weights. empty(bytes): memory outside the device.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        buffers: DeviceBuffers,
        device: torch.device,
        empty: Callable[[int], Tensor],
    ) -> None:
        self._buffers, self._device, self._empty = buffers, device, empty
        self._streams = streams_of(device)
        self._home: Event | None = None  # behind the last copy of gradients to the host
        self._block_of = {id(each): block for block in blocks for each in block.parameters}

    def accumulate(self, weight_grads: WeightGrads, *, waits: bool) -> None:
        """Run W as `weight_grads.accumulate()` does, but block by block; the gradients end on the host.

        waits: whether the host waits for each block's copies.
        """
        for block, part in weight_grads.parts(lambda leaf: self._block_of.get(id(leaf))):
            if block is None:
                part.accumulate()
                continue
            with self._on_device(block, part, waits=waits):
                part.accumulate()

    def finish(self) -> None:
        """Let the host wait for the copies of gradients to the host."""
        if self._home is not None:
            self._home.synchronize()
            self._home = None

    @contextmanager
    def _on_device(self, block: Block, part: WeightGrads, *, waits: bool) -> Iterator[None]:
        """Within this context, the gradients that W adds to are on the device.

        The block's parameters are in a device buffer with any content.
        """
        trained = {id(leaf) for leaf in part.leaves()}
        refuse_hooks(block)
        # W reads a weight's shape, layout and device, but not its values: the buffer's content is irrelevant.
        with block.in_memory(self._buffers.any_memory()):
            before = [_take_gradient(parameter) for parameter in block.parameters]
            try:
                self._bring(block, before, trained)
                yield
            finally:
                after = [_take_gradient(parameter) for parameter in block.parameters]
                block.go_home()
                self._take_home(block, before, after)
                if self._streams is not None:
                    # Not on a stream of their own: `after` is freed here, so that one block's gradients are
                    # on the device.
                    self._home = self._streams.current().record_event()
                    if waits:
                        self._buffers.finish()
                        self.finish()

    def _bring(self, block: Block, gradients: Sequence[Tensor | None], trained: set[int]) -> None:
        """Copy to the device the gradients that W adds to. trained: the ids of their parameters."""
        for parameter, gradient in zip(block.parameters, gradients, strict=True):
            if id(parameter) in trained and gradient is not None:
                on_device = torch.empty_like(gradient, device=self._device)
                parameter.grad = on_device.copy_(gradient, non_blocking=True)

    def _take_home(
        self, block: Block, before: Sequence[Tensor | None], after: Sequence[Tensor | None]
    ) -> None:
        """Copy to the host. before: its gradients before W; after: those that W has left on the device."""
        for number, (home, found) in enumerate(zip(before, after, strict=True)):
            if found is not None:
                home = block.gradient_home(number, self._empty) if home is None else home
                # A copy to another layout has a temporary tensor, and can't be put off.
                is_alike = (found.dtype, found.stride()) == (home.dtype, home.stride())
                home.copy_(found, non_blocking=is_alike)
            block.parameters[number].grad = home


def _take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The parameter's gradient, which is taken off the parameter."""
    gradient, parameter.grad = parameter.grad, None
    return gradient
