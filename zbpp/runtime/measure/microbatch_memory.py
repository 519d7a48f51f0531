"""The bytes that one microbatch takes on a stage: held after F, B and W, and at the most while each one runs.

Works on real tensors and inside FakeTensorMode, where a stage takes no memory and no time to compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from zbpp.autograd.offload.saved_activations import LEAST_BYTES, may_leave
from zbpp.autograd.storages import storages_of
from zbpp.runtime.call import Feed
from zbpp.runtime.layout import layout_of
from zbpp.runtime.measure.live_tensors import LiveTensors
from zbpp.runtime.measure.memory import gradient_for, received
from zbpp.runtime.stage import Loss, RunW, StageWorker, add_weight_gradients
from zbpp.schedule import Op
from zbpp.schedule.microbatch_bytes import MicrobatchBytes

_CPU = torch.device("cpu")


class MicrobatchMemory(NamedTuple):
    """A measured microbatch. outputs: copies of the outputs of F, as inputs of the next stage's F."""

    bytes: MicrobatchBytes
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
    run_w: RunW = add_weight_gradients,
) -> MicrobatchMemory:
    """Run F, B and W of two microbatches, one after the other, and measure the second.

    The first microbatch allocates the gradients, which stay. live: a LiveTensors that the caller has entered.
    run_w: what W does with gradients.
    """
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn)
    worker.run_w = run_w
    feed = Feed([inputs] * 2 if index == 0 else (), [{}] * 2, [target] * 2, [0, 1])
    worker.begin(feed)
    _MicrobatchRun(worker, live, inputs, 0).measured()
    found = _MicrobatchRun(worker, live, inputs, 1).measured()
    worker.end()
    return found


def bytes_that_leave(
    index: int,
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    is_last: bool = False,
    loss_fn: Loss | None = None,
    target: Any = None,
    least_bytes: int = LEAST_BYTES,
) -> int:
    """How many of the bytes that F of one microbatch keeps may leave the device. On CPU or fake tensors."""
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn)
    feed = Feed([inputs] if index == 0 else (), [{}], [target], [0])
    message = tuple(map(received, inputs)) if index else ()
    loss = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
    stays = [*module.parameters(), *module.buffers(), *loss.parameters(), *loss.buffers(), target]
    found = _LeavingStorages(least_bytes, [*message, *inputs, *stays])
    worker.begin(feed)
    with saved_tensors_hooks(found.pack, _unchanged):
        outputs = worker.forward(0, message)
    nbytes = found.nbytes([each for each in outputs if each is not None])
    worker.abandon()
    return nbytes


class _LeavingStorages:
    """Collects the storages of saved tensors that may leave, real or fake, and keeps none of them alive."""

    def __init__(self, least_bytes: int, stays: Sequence[Any]) -> None:
        self._least_bytes, self._stays = least_bytes, _addresses(stays)
        self._found: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        is_plain = type(tensor) in (Tensor, FakeTensor) and may_leave(tensor)
        for storage in storages_of(tensor) if is_plain else ():
            self._found[storage._cdata] = weakref.ref(storage)
        return tensor

    def nbytes(self, outputs: Sequence[Tensor]) -> int:
        """The bytes of the storages that the graph still holds, without the outputs, which others hold."""
        stays = self._stays | _addresses(outputs)
        alive = (each() for address, each in self._found.items() if address not in stays)
        sizes = [each.nbytes() for each in alive if each is not None]
        return sum(size for size in sizes if size >= self._least_bytes)


def _addresses(tensors: Sequence[Any]) -> set[int]:
    given = (each for each in tensors if isinstance(each, Tensor))
    return {storage._cdata for each in given for storage in storages_of(each)}


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _MicrobatchRun:
    """Runs F, B and W of one microbatch, and measures them."""

    def __init__(
        self,
        worker: StageWorker,
        live: LiveTensors,
        inputs: tuple[Any, ...],
        microbatch: int,
    ) -> None:
        self._worker, self._live, self._inputs, self._microbatch = worker, live, inputs, microbatch

    def measured(self) -> MicrobatchMemory:
        before, x, x_is_kept = self._live.now, 0, None
        message: tuple[Any, ...] = ()
        if self._worker.index:
            message = tuple(map(received, self._inputs))
            x_is_kept, x = _watch(message)
        # ---- F
        start = self._live.mark()
        outputs = self._worker.forward(self._microbatch, message)
        rise_f = self._live.highest - start
        del message
        layout = layout_of(outputs)
        copies = tuple([None if each is None else received(each) for each in outputs])
        for copy in copies:
            if copy is not None:
                self._live.forget(copy)
        held = self._live.now
        del outputs
        sent_x = held - self._live.now
        after_f = self._live.now - before
        kept_after_f = bool(x_is_kept and x_is_kept())
        # ---- B
        grads = tuple(each and gradient_for(each, _CPU) for each in layout)
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
        found = MicrobatchBytes(
            saved=after_f - x * kept_after_f,
            deferred=after_b - x * kept_after_b - g * g_kept_after_b,
            x=x,
            g=g,
            sent_x=sent_x,
            sent_g=sent_g,
            x_until=Op.W if kept_after_b else Op.B if kept_after_f else Op.F,
            g_until=Op.W if g_kept_after_b else Op.B,
            rises=(rise_f, rise_b, rise_w, rise_whole),
        )
        return MicrobatchMemory(found, copies)


def _watch(tensors: Sequence[Any]) -> tuple[Any, int]:
    """(a function that says whether any of the tensors' storages is still alive, the storages' bytes)."""
    found = [storage for each in tensors if isinstance(each, Tensor) for storage in storages_of(each)]
    references = [weakref.ref(storage) for storage in found]
    return lambda: any(each() is not None for each in references), sum(each.nbytes() for each in found)
