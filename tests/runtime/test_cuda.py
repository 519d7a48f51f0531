"""What scripts/gpu_check.py does not see of a GPU: waits of the host, allocations. Not run anywhere yet."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zbpp import CudaGraphs, Pipeline, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SIZE, M = 64, 4


def made(schedule, extras=()):
    torch.manual_seed(0)
    timetable = plan(schedule, 1, M)
    stages = {s: nn.Sequential(*layers()).cuda() for s in range(timetable.num_stages)}
    return Pipeline(stages, timetable, F.mse_loss, extras=extras)


def layers():
    for _ in range(4):
        yield from (nn.Linear(SIZE, SIZE), nn.GELU(), nn.BatchNorm1d(SIZE), nn.Dropout(0.2))


def batch():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(M * 8, SIZE, generator=generator).cuda() for _ in range(2))


def step_without_waits(pipeline, x, target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        return pipeline.step(x, target=target)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_the_host_never_waits_for_the_device_within_a_step(schedule):
    with made(schedule) as pipeline:
        x, target = batch()
        pipeline.step(x, target=target)
        assert len(step_without_waits(pipeline, x, target)) == M


def test_a_replayed_step_allocates_little_and_never_waits_for_the_device():
    """The copies of the losses, which the caller gets, are all that is allocated."""
    with made("zb_v", [CudaGraphs()]) as pipeline:
        x, target = batch()
        for _ in range(4):
            pipeline.step(x, target=target)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        losses = step_without_waits(pipeline, x, target)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= M
        assert torch.stack(losses).isfinite().all()


def test_the_pool_of_captured_actions_is_as_large_as_an_eager_step():
    """Microbatches that are never alive together share memory: on one rank 1F1B holds one of them."""
    peaks = {}
    for has_graphs in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with made("1f1b", [CudaGraphs()] if has_graphs else []) as pipeline:
            x, target = batch()
            for _ in range(4):
                pipeline.step(x, target=target)
            torch.cuda.synchronize()
            peaks[has_graphs] = torch.cuda.max_memory_reserved()
    assert peaks[True] <= 2.5 * peaks[False] + 2**25
