"""CUDA graphs on a GPU: equal to eager steps; no allocation and no wait of the host. Not run anywhere yet."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zbpp import CudaGraphs, Pipeline, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SIZE, M, STEPS = 64, 4, 6


def made(schedule, extras, num_layers=4):
    torch.manual_seed(0)
    timetable = plan(schedule, 1, M)
    stages = {s: nn.Sequential(*layers(num_layers)).cuda() for s in range(timetable.num_stages)}
    return Pipeline(stages, timetable, F.mse_loss, extras=extras)


def layers(count):
    for _ in range(count):
        yield from (nn.Linear(SIZE, SIZE), nn.GELU(), nn.BatchNorm1d(SIZE), nn.Dropout(0.2))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(M * 8, SIZE, generator=generator).cuda() for _ in range(2))


def trained(schedule, has_graphs):
    extras = [CudaGraphs()] if has_graphs else []
    with made(schedule, extras) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        found = []
        for number in range(STEPS):
            x, target = batch(number)
            found += pipeline.step(x, target=target)
            found += [each.grad.clone() for each in pipeline.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found += [each.clone() for stage in pipeline.stages.values() for each in stage.state_dict().values()]
        assert all(each.num_replays == STEPS - 2 for each in extras)
        return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_zb"])
def test_replayed_steps_equal_eager_ones_with_dropout(schedule):
    for one, other in zip(trained(schedule, False), trained(schedule, True), strict=True):
        assert torch.equal(one, other)


def test_a_replayed_step_allocates_little_and_never_waits_for_the_device():
    """The copies of the losses, which the caller gets, are all that is allocated."""
    with made("zb_v", [CudaGraphs()]) as pipeline:
        x, target = batch(0)
        for _ in range(4):
            pipeline.step(x, target=target)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            losses = pipeline.step(x, target=target)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= M
        assert torch.stack(losses).isfinite().all()


def test_the_pool_of_captured_actions_is_as_large_as_an_eager_step():
    """Microbatches that are never alive together share memory: on one rank 1F1B holds one of them."""
    peaks = {}
    for has_graphs in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with made("1f1b", [CudaGraphs()] if has_graphs else []) as pipeline:
            x, target = batch(0)
            for _ in range(4):
                pipeline.step(x, target=target)
            torch.cuda.synchronize()
            peaks[has_graphs] = torch.cuda.max_memory_reserved()
    assert peaks[True] <= 2.5 * peaks[False] + 2**25


def test_the_host_starts_a_replayed_action_in_a_fifth_of_the_time():
    times = {}
    for has_graphs in (False, True):
        with made("zb_h1", [CudaGraphs()] if has_graphs else [], num_layers=16) as pipeline:
            x, target = batch(0)
            for _ in range(5):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                pipeline.step(x, target=target)
                times[has_graphs] = time.perf_counter() - begin
    assert times[True] <= 0.2 * times[False]


def test_a_stage_that_reads_values_is_refused():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    stage = Reads(SIZE, SIZE).cuda()
    with Pipeline({0: stage}, plan("zb_h1", 1, M), F.mse_loss, extras=[CudaGraphs()]) as pipeline:
        x, target = batch(0)
        for _ in range(2):
            pipeline.step(x, target=target)
        with pytest.raises(RuntimeError) as caught:
            pipeline.step(x, target=target)
    assert "in 0F0 (F, the forward, of stage 0, microbatch 0) on rank 0" in caught.value.__notes__
    assert "a step can't be captured" in caught.value.__notes__[-1]
