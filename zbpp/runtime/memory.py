"""Bytes of live tensors: what a step needs at most, and what one microbatch leaves behind on a stage.

CUDA's allocator counts them itself. On the CPU nobody does, but torch's profiler is told of every
allocation and every release, so a run under it can be added up afterwards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

from zbpp.runtime.layout import Layout, TensorLayout, layout_of
from zbpp.runtime.stage import Feed, Loss, StageWorker
from zbpp.runtime.world import gather


class Level(NamedTuple):
    """Bytes of live tensors over those before: the most there were, and what was left at the end."""

    highest: int
    after: int


class Held(NamedTuple):
    """What one microbatch leaves on a stage, in bytes: from F until B, and from B until W."""

    saved: int
    deferred: int


def live_bytes(run: Callable[[], object], device: torch.device) -> Level:
    """The level of live tensors on `device` while `run` runs and after it. It slows what it runs.

    On the CPU what nobody measured when it was made isn't missed when it goes.
    """
    if device.type == "cuda":
        return _on_cuda(run, device)
    return _on_cpu(run)


def _on_cuda(run: Callable[[], object], device: torch.device) -> Level:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return Level(
        torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    )


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
    """The profiler's library announces each start and stop on stderr, past Python."""
    sys.stderr.flush()
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def held_per_stage(
    stages: Mapping[int, nn.Module],
    inputs: Mapping[int, tuple[Any, ...]],
    num_stages: int,
    device: torch.device,
    *,
    loss_fn: Loss | None,
    target: Any,
    group: dist.ProcessGroup | None = None,
) -> list[Held]:
    """`held_bytes` of every stage of the pipeline, in its order. Collective.

    stages: this rank's. inputs: as `first_inputs` has them; target: of one microbatch, for the last stage.
    """
    last = num_stages - 1
    mine = {
        index: held_bytes(
            index, stage, inputs[index], device, loss_fn=loss_fn, target=target, is_last=index == last
        )
        for index, stage in stages.items()
    }
    found: dict[int, Held] = {}
    for each in gather(mine, group):
        found |= each
    return [found[index] for index in range(num_stages)]


def held_bytes(
    index: int,
    module: nn.Module,
    inputs: tuple[Any, ...],
    device: torch.device,
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
    is_last: bool = False,
) -> Held:
    """Run F and B of one microbatch on a stage and see what stays. Afterwards all is as it was.

    inputs: what F got. Those of a later stage count, since they arrived for this microbatch alone;
    the batch that stage 0 reads is there anyway. Buffers, gradients and random numbers are restored.
    """
    worker = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn, device=device)
    worker.begin(Feed([inputs] if index == 0 else (), [{}], [target], [0]))
    layouts: list[Layout] = []

    def forward() -> None:
        layouts.append(layout_of(worker.forward(0, () if index == 0 else tuple(map(_arrived, inputs)))))

    def backward() -> None:
        worker.backward_input(0, tuple(each and _gradient(each, device) for each in layouts[0]))

    with _undone(module, device):
        saved = live_bytes(forward, device).after
        deferred = saved + live_bytes(backward, device).after
        worker.abandon()
    return Held(saved, deferred)


def _arrived(value: Any) -> Any:
    """As in a receive buffer of its own."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _gradient(layout: TensorLayout, device: torch.device) -> Tensor:
    return torch.ones(layout.shape, dtype=layout.dtype, device=device)


@contextmanager
def _undone(module: nn.Module, device: torch.device) -> Iterator[None]:
    """What is done to the module inside has no effect outside."""
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
    """What each stage gets first inside, copied: stage -> its inputs; filled while the block runs."""
    found: dict[int, tuple[Any, ...]] = {}

    def keep(index: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if index not in found:
            found[index] = tuple(map(_arrived, inputs))

    handles = [stage.register_forward_pre_hook(partial(keep, index)) for index, stage in stages.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
