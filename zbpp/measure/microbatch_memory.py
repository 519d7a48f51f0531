"""The bytes that one microbatch takes on a stage: held after F, B and W, and at the most while each one runs.

Works on real tensors and inside FakeTensorMode, where a stage takes no memory and no time to compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zbpp.autograd.models.past import Past
from zbpp.autograd.offload.saved_activations import LEAST_BYTES, may_leave
from zbpp.autograd.storages import bytes_of, storages_of
from zbpp.devices import restored_generators
from zbpp.job.agreement import gather
from zbpp.measure.live_tensors import Counter, LiveTensors, counter_of
from zbpp.runtime.call.feed import Feed, LossGradients
from zbpp.runtime.call.weights import weights_of
from zbpp.runtime.layout import Layout, TensorLayout, layout_of
from zbpp.runtime.restored import restored_buffers
from zbpp.runtime.stage import Loss, RunW, StageWorker
from zbpp.schedule import Op
from zbpp.schedule.interpret.stage_bytes import MicrobatchBytes
from zbpp.stage_api import mark_of, takes_slices

_Found = TypeVar("_Found")


class MicrobatchMemory(NamedTuple):
    """A measured microbatch: bytes and outputs of each of its slices; of the microbatch alone without slices.

    outputs: copies of the outputs of F, as inputs of the next stage's F. past, past_gradients: the bytes of
    the keys and values that the slices share, and of the sums of their gradients.
    """

    bytes: list[MicrobatchBytes]
    outputs: list[tuple[Any, ...]]
    past: int = 0
    past_gradients: int = 0


def microbatch_memory(
    index: int,
    module: nn.Module,
    inputs: Sequence[tuple[Any, ...]],
    live: LiveTensors,
    *,
    is_last: bool = False,
    loss_fn: Loss | None = None,
    target: Sequence[Any] = (None,),
    head_at_once: bool = False,
    wraps_w: bool = False,
    slice_bounds: Sequence[int] = (),
) -> MicrobatchMemory:
    """Run F, B and W of a microbatch, then F and BW of another, and measure both.

    A first run of one slice allocates the gradients, which stay. inputs, target: of each slice of a
    microbatch; one entry without slices. live: a LiveTensors that the caller has entered. head_at_once: see
    zbpp.HeadAtOnce. wraps_w: whether a feature wraps what runs W, so that BW holds as much as B and a later
    W.
    """
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn)
    if wraps_w:
        worker.run_w = partial(StageWorker.accumulate, worker)
    head_w, kept = worker.accumulate if head_at_once else None, list[tuple[Any, ...]]()
    keep = partial(_keep, live, kept)

    @contextmanager
    def runs(num: int, bounds: Sequence[int], count: int) -> Iterator[list[_Runs]]:
        """`count` microbatches of the first `num` slices, none of which has run."""
        pasts = [past_of(index, module, bounds) for _ in range(count)]
        keywords = [each for past in pasts for each in slice_keywords(past, num)]
        given, targets = [*inputs[:num]] * count, [*target[:num]] * count
        worker.begin(trial_feed(given if index == 0 else (), keywords, targets, range(count * num), loss_fn))
        units = [
            _UnitRun(worker, live, each, unit, head_w, keep, pasts[unit // num])
            for unit, each in enumerate(given)
        ]
        yield [_Runs(units[num * each : num * (each + 1)], pasts[each]) for each in range(count)]
        worker.end()

    with runs(1, slice_bounds[:2], 1) as (first,):
        _measured(*first)
    with runs(len(inputs), slice_bounds, 2) as (split, whole):
        found = _measured(*split)
        rises = _rises_of_bw(whole.units)
    slices = [
        replace(each, rises=(*each.rises[:3], rise)) for each, rise in zip(found.bytes, rises, strict=True)
    ]
    return found._replace(bytes=slices, outputs=kept[-len(inputs) :])


class _Runs(NamedTuple):
    """The slices of a microbatch, and what they share."""

    units: list[_UnitRun]
    past: Past | None


def _keep(live: LiveTensors, kept: list[tuple[Any, ...]], outputs: tuple[Any, ...]) -> None:
    """Keep copies of the outputs of F, and do not count them."""
    kept.append(tuple(map(received, outputs)))
    for each in kept[-1]:
        if isinstance(each, Tensor):
            live.forget(each)


def past_of(index: int, module: nn.Module, slice_bounds: Sequence[int]) -> Past | None:
    """A Past for one microbatch; None without slices, and for a stage that takes no sequence_slice."""
    return Past(slice_bounds) if slice_bounds and takes_slices(module, index) else None


def slice_keywords(past: Past | None, num_slices: int) -> list[dict[str, Any]]:
    """The keyword arguments of F of each slice."""
    return [{} if past is None else {"sequence_slice": past.at(k)} for k in range(num_slices)]


def _measured(runs: Sequence[_UnitRun], past: Past | None) -> MicrobatchMemory:
    """Run F's of the slices of a microbatch, then B and W of each, from the last slice to the first."""
    forwards = [run.forward() for run in runs]
    held = 0 if past is None else past.held_bytes
    gradients, found = 0, list[MicrobatchBytes]()
    for run, f in zip(reversed(runs), reversed(forwards), strict=True):
        b = run.backward_input()
        if run is runs[-1] and past is not None and len(runs) > 1:
            gradients = past.held_bytes - held
        found.insert(0, run.weights_after(f, b))
    return MicrobatchMemory(found, [], held, gradients)


def _rises_of_bw(runs: Sequence[_UnitRun]) -> list[int]:
    """Run F's of the slices of a microbatch, then BW of each, from the last slice to the first."""
    for run in runs:
        run.forward()
    return [run.backward() for run in reversed(runs)][::-1]


class StageMemory(NamedTuple):
    """The bytes that one microbatch holds on a stage: saved, from F until B; deferred, from B until W."""

    saved: int
    deferred: int


def stage_memory(
    index: int,
    module: nn.Module,
    inputs: tuple[Any, ...],
    device: torch.device,
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
    is_last: bool = False,
    head_at_once: bool = False,
) -> StageMemory:
    """Run F and B of one microbatch on a stage, and measure the bytes that stay. inputs: of F.

    head_at_once: leave out what only the head's W needs, see zbpp.HeadAtOnce.
    The inputs of stage 1 and later count, since each microbatch has its own receive buffer. The inputs of
    stage 0 do not count, since the batch is there anyway. Module buffers and random numbers are restored
    afterwards; F and B change no gradients.
    """
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn, device=device)
    worker.begin(trial_feed([inputs] if index == 0 else (), [{}], [target], [0], loss_fn))
    with restored_buffers([module]), restored_generators(device), counter_of(device) as live:
        run = _UnitRun(worker, live, inputs, 0, (lambda _, dropped: None) if head_at_once else None)
        saved, deferred = run.forward().held, run.backward_input().held
        worker.abandon()
    return StageMemory(saved, deferred)


class _Half(NamedTuple):
    """F or B of a microbatch.

    held: the bytes of this microbatch that are alive after it. message: the bytes that it was given. sent:
    the bytes that it gave. rise: the most above the level before it. keeps_x, keeps_g: whether the messages
    that F and B were given are alive after it.
    """

    held: int
    message: int
    sent: int
    rise: int
    keeps_x: bool
    keeps_g: bool = False


class _UnitRun:
    """Runs F, B and W of one microbatch, or of one slice of it, and measures them.

    head_w: called behind B with the W of a language model's head, if this W doesn't wait. keep: called with
    the outputs of F. past: what the slice shares with the others, which is not counted here.
    """

    def __init__(
        self,
        worker: StageWorker,
        live: Counter,
        inputs: tuple[Any, ...],
        unit: int,
        head_w: RunW | None = None,
        keep: Callable[[tuple[Any, ...]], None] = lambda outputs: None,
        past: Past | None = None,
    ) -> None:
        self._worker, self._live, self._inputs, self._unit = worker, live, inputs, unit
        self._head_w, self._keep, self._past = head_w, keep, past
        self._layout: Layout = ()
        self._held = 0  # bytes of this unit that are alive

    def forward(self) -> _Half:
        """Run F."""
        before = self._own_level()
        message: tuple[Any, ...] = tuple(map(received, self._inputs)) if self._worker.index else ()
        self._keeps_x, x = _watch(message)
        start = self._live.mark()
        outputs = self._worker.forward(self._unit, message)
        rise = self._live.highest - start
        del message
        self._layout = layout_of(outputs)
        self._keep(outputs)
        with_outputs = self._live.now
        del outputs
        sent = with_outputs - self._live.now
        self._held += self._own_level() - before
        return _Half(self._held, x, sent, rise, self._keeps_x())

    def backward_input(self) -> _Half:
        """Run B."""
        before = self._own_level()
        message = tuple(each and gradient_for(each, self._worker.device) for each in self._layout)
        keeps_g, g = _watch(message)
        start = self._live.mark()
        given = self._worker.backward_input(self._unit, message)
        if self._head_w is not None:
            weight_grads = self._worker.deferred(self._unit)
            self._head_w(self._unit, weight_grads.take(weight_grads.is_large))
        rise = self._live.highest - start
        del message
        with_given = self._live.now
        del given
        sent = with_given - self._live.now
        self._held += self._own_level() - before
        return _Half(self._held, g, sent, rise, self._keeps_x(), keeps_g())

    def backward(self) -> int:
        """Run BW; returns the most above the level before it."""
        message = tuple(each and gradient_for(each, self._worker.device) for each in self._layout)
        start = self._live.mark()
        self._worker.backward(self._unit, message)
        return self._live.highest - start

    def weights_after(self, f: _Half, b: _Half) -> MicrobatchBytes:
        """Run W; returns all that was measured of F, B and W."""
        start = self._live.mark()
        self._worker.backward_weight(self._unit)
        rise = self._live.highest - start
        return MicrobatchBytes(
            saved=f.held - f.message * f.keeps_x,
            deferred=b.held - f.message * b.keeps_x - b.message * b.keeps_g,
            x=f.message,
            g=b.message,
            sent_x=f.sent,
            sent_g=b.sent,
            x_until=Op.W if b.keeps_x else Op.B if f.keeps_x else Op.F,
            g_until=Op.W if b.keeps_g else Op.B,
            rises=(f.rise, b.rise, rise, 0),  # of BW: `_rises_of_bw`
        )

    def _own_level(self) -> int:
        return self._live.now - (0 if self._past is None else self._past.held_bytes)


def _watch(tensors: Sequence[Any]) -> tuple[Callable[[], bool], int]:
    """(a function that says whether any of the tensors' storages is still alive, the storages' bytes)."""
    found = [storage for each in tensors if isinstance(each, Tensor) for storage in storages_of(each)]
    references = [weakref.ref(storage) for storage in found]
    return lambda: any(each() is not None for each in references), sum(each.nbytes() for each in found)


def received(value: Any) -> Any:
    """A copy, as if it had just been received into a buffer."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def gradient_for(layout: TensorLayout, device: torch.device) -> Tensor | None:
    """A gradient of an output with this layout; None for an output of integers."""
    is_real = layout.dtype.is_floating_point or layout.dtype.is_complex
    return torch.ones(layout.shape, dtype=layout.dtype, device=device) if is_real else None


@contextmanager
def first_inputs(stages: Mapping[int, nn.Module]) -> Iterator[dict[int, tuple[Any, ...]]]:
    """{stage: a copy of the inputs of its first forward}, filled while this context is active."""
    found: dict[int, tuple[Any, ...]] = {}

    def keep(index: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if index not in found:
            found[index] = tuple(map(received, inputs))

    handles = [stage.register_forward_pre_hook(partial(keep, index)) for index, stage in stages.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# ---- All stages of a pipeline


def memory_per_stage(
    stages: Mapping[int, nn.Module],
    inputs: Mapping[int, tuple[Any, ...]],
    num_stages: int,
    device: torch.device,
    *,
    loss_fn: Loss | None,
    target: Any,
    group: dist.ProcessGroup | None = None,
    head_at_once: bool = False,
) -> list[StageMemory]:
    """`stage_memory` of every stage of the pipeline, in stage order. Collective.

    stages: this rank's stages. inputs: the inputs of each stage, from `first_inputs`. target: the target of
    one microbatch, on the rank with the last stage.
    """
    last = num_stages - 1
    options: dict[str, Any] = {"loss_fn": loss_fn, "target": target, "head_at_once": head_at_once}
    mine = {
        index: stage_memory(index, stage, inputs[index], device, is_last=index == last, **options)
        for index, stage in stages.items()
    }
    return _of_all_stages(mine, num_stages, group)


def static_per_stage(
    stages: Mapping[int, nn.Module], num_stages: int, group: dist.ProcessGroup | None = None
) -> list[int]:
    """The bytes that each stage of the pipeline holds all the time, in stage order. Collective.

    These are weights and module buffers, and for each trained weight a gradient and two optimizer states, as
    AdamW has them. stages: this rank's stages.
    """
    mine = {index: static_bytes(stage) for index, stage in stages.items()}
    return _of_all_stages(mine, num_stages, group)


def _of_all_stages(
    mine: Mapping[int, _Found], num_stages: int, group: dist.ProcessGroup | None
) -> list[_Found]:
    """What was found of each stage of the pipeline, in stage order. Collective."""
    found = {index: each for of_rank in gather(mine, group) for index, each in of_rank.items()}
    return [found[index] for index in range(num_stages)]


def static_bytes(stage: nn.Module) -> int:
    """The bytes that one stage holds all the time on this rank.

    A weight with a main_grad counts with its main_grad, a master and two states, all in float32.
    """
    trained = {each for each in stage.parameters() if each.requires_grad}
    held = bytes_of([*stage.parameters(), *stage.buffers()])
    for each in trained:
        main = getattr(each, "main_grad", None)
        held += 3 * bytes_of([each]) if main is None else 4 * bytes_of([main])
    return held


# ---- What may leave the device


def trial_feed(
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    targets: Sequence[Any],
    seeds: Sequence[int],
    loss_fn: object,
) -> Feed:
    """What a stage gets in a trial. A loss that counts its targets is weighed, as in a step."""
    count = mark_of(loss_fn, "num_targets")
    tensors = [each for each in tree_leaves(targets) if isinstance(each, Tensor)]
    weights = weights_of(targets, count, tensors[0].device, 1) if count is not None and tensors else None
    return Feed(args, kwargs, targets, seeds, LossGradients(), weights=weights)


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
    feed = trial_feed([inputs] if index == 0 else (), [{}], [target], [0], loss_fn)
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
