"""The bytes that one microbatch needs on a stage: what stays after F, B and W, and what they need meanwhile.

Works on real tensors and inside FakeTensorMode, where a stage needs no memory and no time to compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.autograd.storages import storages_of
from zbpp.runtime.feed import Feed
from zbpp.runtime.layout import TensorLayout, layout_of
from zbpp.runtime.live_tensors import LiveTensors
from zbpp.runtime.stage import Loss, StageWorker
from zbpp.schedule import Op

_CPU = torch.device("cpu")


class MicrobatchMemory(NamedTuple):
    """Bytes; the same words as in zbpp.planning.memory_budget.StageBytes.

    outputs: copies of what F returned, for the next stage's F.
    """

    saved: int
    deferred: int
    x: int
    g: int
    sent_x: int
    sent_g: int
    x_until: Op
    g_until: Op
    rises: tuple[int, int, int, int]
    outputs: tuple[Any, ...]


def microbatch_memory(
    index: int,
    module: nn.Module,
    inputs: tuple[Any, ...],
    live: LiveTensors,
    *,
    is_last: bool = False,
    loss_fn: Loss | None = None,
    target: Any = None,
    device: torch.device = _CPU,
) -> MicrobatchMemory:
    """Run F, B and W of two microbatches, one after the other, and measure the second.

    The first one makes the gradients, which stay. live: entered by the caller.
    """
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn, device=device)
    feed = Feed([inputs] * 2 if index == 0 else (), [{}] * 2, [target] * 2, [0, 1])
    worker.begin(feed)
    _Run(worker, live, inputs, 0, device).measured()
    found = _Run(worker, live, inputs, 1, device).measured()
    worker.end()
    return found


class _Run:
    """One microbatch's F, B and W."""

    def __init__(
        self,
        worker: StageWorker,
        live: LiveTensors,
        inputs: tuple[Any, ...],
        microbatch: int,
        device: torch.device,
    ) -> None:
        self._worker, self._live, self._inputs = worker, live, inputs
        self._microbatch, self._device = microbatch, device

    def measured(self) -> MicrobatchMemory:
        before, x, x_is_kept = self._live.now, 0, None
        message: tuple[Any, ...] = ()
        if self._worker.index:
            message = tuple(map(_received, self._inputs))
            x_is_kept, x = _watch(message)
        # ---- F
        start = self._live.mark()
        outputs = self._worker.forward(self._microbatch, message)
        rise_f = self._live.highest - start
        del message
        layout = layout_of(outputs)
        copies = tuple([None if each is None else _received(each) for each in outputs])
        for copy in copies:
            if copy is not None:
                self._live.forget(copy)
        held = self._live.now
        del outputs
        sent_x = held - self._live.now
        after_f = self._live.now - before
        kept_after_f = bool(x_is_kept and x_is_kept())
        # ---- B
        grads = tuple(each and _gradient(each, self._device) for each in layout)
        g_is_kept, g = _watch(grads)
        start = self._live.mark()
        given = self._worker.backward_input(self._microbatch, grads)
        rise_b = self._live.highest - start
        del grads
        held = self._live.now
        del given
        sent_g = held - self._live.now
        after_b = self._live.now - before
        kept_after_b = bool(x_is_kept and x_is_kept())
        g_kept_after_b = g_is_kept()
        # ---- W
        start_w = self._live.mark()
        self._worker.backward_weight(self._microbatch)
        rise_w = self._live.highest - start_w
        rise_whole = max(rise_b, start_w + sent_g - start + rise_w)
        return MicrobatchMemory(
            saved=after_f - x * kept_after_f,
            deferred=after_b - x * kept_after_b - g * g_kept_after_b,
            x=x,
            g=g,
            sent_x=sent_x,
            sent_g=sent_g,
            x_until=Op.W if kept_after_b else Op.B if kept_after_f else Op.F,
            g_until=Op.W if g_kept_after_b else Op.B,
            rises=(rise_f, rise_b, rise_w, rise_whole),
            outputs=copies,
        )


def _received(value: Any) -> Any:
    """A copy, as if it had just been received into a buffer."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _gradient(layout: TensorLayout, device: torch.device) -> Tensor | None:
    is_real = layout.dtype.is_floating_point or layout.dtype.is_complex
    return torch.ones(layout.shape, dtype=layout.dtype, device=device) if is_real else None


def _watch(tensors: Sequence[Any]) -> tuple[Any, int]:
    """(a function that says whether any of the tensors' memory is still alive, its bytes)."""
    found = [storage for each in tensors if isinstance(each, Tensor) for storage in storages_of(each)]
    references = [weakref.ref(storage) for storage in found]
    return lambda: any(each() is not None for each in references), sum(each.nbytes() for each in found)
