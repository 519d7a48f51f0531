"""parallel.speeds=null with model.layers_per_stage=auto: each process times a block on its own device.

On accelerators each process also looks how much memory its device has free, for memory.limit=null.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.config import NUM_MICROBATCHES, TrainConfig, with_values
from zbpp.devices import free_bytes, is_accelerator, make_current, restored_generators, synchronize
from zbpp.job.cuda_settings import use_expandable_segments
from zbpp.job.world import own_device
from zbpp.planning import plan
from zbpp.run.cut import Changes, earlier_cut, fits, uncut
from zbpp.run.model import build_model, layers_per_stage
from zbpp.run.stages import Parts, first_inputs, move_stages
from zbpp.schedule import Timetable
from zbpp.training.optim.precision import PRECISIONS

ALIKE = 0.1  # speeds that differ by no more than this share of the larger one count as equal
_TIMES = 5  # that F and B of the block are timed at least; the shortest time counts
_SECONDS = 0.5  # in which they are timed again: a small block is measured badly by few times


class Ranks(Protocol):
    """The processes of the job, which exchange texts, such as zbpp.job.joining.Meeting."""

    def of_rank_0(self, name: str, text: str) -> str:
        """Rank 0's text, on every rank."""

    def gather(self, name: str, text: str) -> list[str]:
        """Every rank's text, on every rank."""


BuildParts = Callable[[TrainConfig, Timetable, int], Parts]


def measured_ranks(job: Ranks, config: TrainConfig, num_ranks: int, build_parts: BuildParts) -> Changes:
    """Measure the speeds of a pipeline's ranks, by `block_seconds` of each process. Collective.

    Returns parallel.speeds, as a change to the config; on accelerators memory.limit, too, if there is none:
    the free memory of each device. {} if the run has a cut from an earlier start, which it keeps.
    A rank with several processes (replicas, shards) is as fast as the slowest of them, and has the memory of
    the smallest.
    """
    earlier = earlier_cut(config)  # only rank 0 need see the run's folder
    is_kept = bool(earlier) and fits(earlier, config, num_ranks)
    if job.of_rank_0("is_kept", str(is_kept)) == str(True):
        return {}
    free = _free_gib(own_device(config.parallel.device))
    # All ranks time at once: what one of them still loads would slow down others on the same machine.
    own = block_seconds(config, num_ranks, build_parts, lambda: job.gather("ready", ""))
    everyone = [each.split() for each in job.gather("block", f"{own!r} {free}")]
    each = len(everyone) // num_ranks
    ranks = [everyone[first : first + each] for first in range(0, len(everyone), each)]
    speeds = speeds_by_time([max(float(seconds) for seconds, _ in rank) for rank in ranks])
    limits = [min(float(memory) for _, memory in rank) for rank in ranks]
    found: Changes = {"parallel.speeds": speeds}
    if config.memory.limit is None and all(limits):
        found["memory.limit"] = limits
    return found


def _free_gib(device: torch.device) -> float:
    """The free memory of an accelerator's device in GiB, rounded down; 0 for a CPU, which others use, too."""
    if not is_accelerator(device):
        return 0.0
    make_current(device)
    return math.floor(free_bytes(device) / 2**30 * 100) / 100


def speeds_by_time(seconds: Sequence[float]) -> list[float]:
    """The speeds of ranks that took these times for the same work; those of the slowest ranks are 1.

    From the fastest rank down, all within 10 % of a group's fastest rank are one group, which has its mean
    speed: a noisy machine with equal ranks keeps the even cut.
    """
    speeds = {rank: 1 / time for rank, time in enumerate(seconds)}
    groups: list[list[int]] = []
    for rank in sorted(speeds, key=speeds.__getitem__, reverse=True):
        if groups and speeds[rank] >= (1 - ALIKE) * speeds[groups[-1][0]]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    of_group = [mean(speeds[rank] for rank in group) for group in groups]
    found = {
        rank: round(speed / of_group[-1], 2)
        for group, speed in zip(groups, of_group, strict=True)
        for rank in group
    }
    return [found[rank] for rank in range(len(seconds))]


def block_seconds(
    config: TrainConfig, num_ranks: int, build_parts: BuildParts, wait: Callable[[], object]
) -> float:
    """How long F and B of the model's first block take on this process's device, for one microbatch.

    wait: called when the block has run for the first time, and before it is timed.
    """
    device = own_device(config.parallel.device)
    if is_accelerator(device):
        make_current(device)
        use_expandable_segments()  # before the first tensor
    even = uncut(config)
    number = sum(layers_per_stage(build_model(even.model, even.seed), num_ranks) or ())
    finest = with_values(even, {"model.layers_per_stage": [1] * number, "schedule.slices": None})
    microbatches = NUM_MICROBATCHES if config.num_microbatches is None else config.num_microbatches
    with restored_generators(device):
        timetable = plan("1f1b", number, microbatches)
        parts = build_parts(finest, timetable, 0)
        move_stages(parts.stages, device, PRECISIONS[config.precision])
        inputs = next(first_inputs(parts.data, parts.stages, timetable, device))
        _seconds(parts.stages[0], inputs, device)
        wait()
        found, end = list[float](), time.monotonic() + _SECONDS
        while len(found) <= _TIMES or time.monotonic() < end:
            found.append(_seconds(parts.stages[0], inputs, device))
        return min(found)


def _seconds(block: nn.Module, inputs: Sequence[Any], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    outputs = [each for each in tree_leaves(block(*inputs)) if isinstance(each, Tensor)]
    if trained := [each for each in outputs if each.requires_grad]:
        torch.autograd.backward(trained, [torch.ones_like(each) for each in trained])
    synchronize(device)
    return time.perf_counter() - begin
