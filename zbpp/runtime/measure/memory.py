"""The bytes of live tensors: the most during a run, and those that one microbatch leaves on a stage.

On CUDA the allocator counts them. On the CPU torch's profiler records every allocation and every release, and
this module adds them up after the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

from zbpp.autograd.storages import bytes_of
from zbpp.job.agreement import gather
from zbpp.runtime.call import Feed
from zbpp.runtime.layout import Layout, TensorLayout, layout_of
from zbpp.runtime.measure.live_tensors import AllocatedBytes
from zbpp.runtime.stage import Loss, StageWorker

_Found = TypeVar("_Found")


class Level(NamedTuple):
    """Bytes of live tensors beyond those before a run: the most during it, and those left after it."""

    highest: int
    after: int


class StageMemory(NamedTuple):
    """The bytes that one microbatch holds on a stage: saved, from F until B; deferred, from B until W."""

    saved: int
    deferred: int


def live_bytes(run: Callable[[], object], device: torch.device) -> Level:
    """Call `run` and measure the live tensors on `device`, which slows it down.

    On the CPU, a tensor that was allocated before measuring began is not counted when it is freed.
    """
    if device.type != "cuda":
        return _on_cpu(run)
    counter = AllocatedBytes(device)
    before = counter.mark()
    run()
    return Level(counter.highest - before, counter.now - before)


def _on_cpu(run: Callable[[], object]) -> Level:
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    )
    with _silence():
        profiler.start()
    try:
        run()
    finally:
        with _silence():
            profiler.stop()
    found: Any = profiler.profiler
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in found.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    level = highest = 0
    for _, change in changes:
        level += change
        highest = max(highest, level)
    return Level(highest, level)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what is written to file descriptor 2: the profiler's library reports each start and stop there."""
    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def memory_per_stage(
    stages: Mapping[int, nn.Module],
    inputs: Mapping[int, tuple[Any, ...]],
    num_stages: int,
    device: torch.device,
    *,
    loss_fn: Loss | None,
    target: Any,
    group: dist.ProcessGroup | None = None,
) -> list[StageMemory]:
    """`stage_memory` of every stage of the pipeline, in stage order. Collective.

    stages: this rank's stages. inputs: the inputs of each stage, from `first_inputs`. target: the target of
    one microbatch, on the rank with the last stage.
    """
    last = num_stages - 1
    mine = {
        index: stage_memory(
            index, stage, inputs[index], device, loss_fn=loss_fn, target=target, is_last=index == last
        )
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


def stage_memory(
    index: int,
    module: nn.Module,
    inputs: tuple[Any, ...],
    device: torch.device,
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
    is_last: bool = False,
) -> StageMemory:
    """Run F and B of one microbatch on a stage, and measure the bytes that stay. inputs: of F.

    The inputs of stage 1 and later count, since each microbatch has its own receive buffer. The inputs of
    stage 0 do not count, since the batch is there anyway. Module buffers, gradients and random numbers are
    restored afterwards.
    """
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn, device=device)
    worker.begin(Feed([inputs] if index == 0 else (), [{}], [target], [0]))
    layouts: list[Layout] = []

    def forward() -> None:
        layouts.append(layout_of(worker.forward(0, () if index == 0 else tuple(map(received, inputs)))))

    def backward() -> None:
        worker.backward_input(0, tuple(each and gradient_for(each, device) for each in layouts[0]))

    with _restored(module, device):
        saved = live_bytes(forward, device).after
        deferred = saved + live_bytes(backward, device).after
        worker.abandon()
    return StageMemory(saved, deferred)


def received(value: Any) -> Any:
    """A copy, as if it had just been received into a buffer."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def gradient_for(layout: TensorLayout, device: torch.device) -> Tensor | None:
    """A gradient of an output with this layout; None for an output of integers."""
    is_real = layout.dtype.is_floating_point or layout.dtype.is_complex
    return torch.ones(layout.shape, dtype=layout.dtype, device=device) if is_real else None


@contextmanager
def _restored(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore module buffers, gradients and random numbers at the end of this context."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for parameter, grad in grads:
        parameter.grad = grad


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
