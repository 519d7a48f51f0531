"""CUDA graphs on a GPU: equal to eager steps; no allocation and no wait of the host. Not run anywhere yet."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zbpp import Pipeline, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SIZE, M, STEPS = 64, 4, 6
MODES = ["actions", "program"]


def made(schedule, mode, num_layers=4):
    torch.manual_seed(0)
    timetable = plan(schedule, 1, M)
    stages = {s: nn.Sequential(*layers(num_layers)).cuda() for s in range(timetable.num_stages)}
    return Pipeline(stages, timetable, F.mse_loss, cuda_graphs=mode)


def layers(count):
    for _ in range(count):
        yield from (nn.Linear(SIZE, SIZE), nn.GELU(), nn.BatchNorm1d(SIZE), nn.Dropout(0.2))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(M * 8, SIZE, generator=generator).cuda() for _ in range(2))


def trained(schedule, mode):
    with made(schedule, mode) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        found = []
        for number in range(STEPS):
            x, target = batch(number)
            found += pipeline.step(x, target=target)
            found += [each.grad.clone() for each in pipeline.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found += [each.clone() for stage in pipeline.stages.values() for each in stage.state_dict().values()]
        graphs = pipeline._engine.graphs
        assert mode == "none" or (graphs.stopped, graphs.num_replays) == ("", STEPS - 2)
        return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_zb"])
def test_replayed_steps_equal_eager_ones_with_dropout(schedule, mode):
    for one, other in zip(trained(schedule, "none"), trained(schedule, mode), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", MODES)
def test_a_replayed_step_allocates_little_and_never_waits_for_the_device(mode):
    """The copies of the losses, which the caller gets, are all that is allocated."""
    with made("zb_v", mode) as pipeline:
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
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 1
        assert torch.stack(losses).isfinite().all()


def test_the_pool_of_captured_actions_is_as_large_as_an_eager_step():
    """Microbatches that are never alive together share memory: on one rank 1F1B holds one of them."""
    peaks = {}
    for mode in ("none", "actions"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with made("1f1b", mode) as pipeline:
            x, target = batch(0)
            for _ in range(4):
                pipeline.step(x, target=target)
            torch.cuda.synchronize()
            peaks[mode] = torch.cuda.max_memory_reserved()
    assert peaks["actions"] <= 2.5 * peaks["none"] + 2**25


def test_the_host_starts_a_replayed_action_in_a_fifth_of_the_time():
    times = {}
    for mode in ("none", "actions"):
        with made("zb_h1", mode, num_layers=16) as pipeline:
            x, target = batch(0)
            for _ in range(5):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                pipeline.step(x, target=target)
                times[mode] = time.perf_counter() - begin
    assert times["actions"] <= 0.2 * times["none"]


def test_a_stage_that_reads_values_runs_eagerly(caplog):
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    stage = Reads(SIZE, SIZE).cuda()
    with Pipeline({0: stage}, plan("zb_h1", 1, M), F.mse_loss, cuda_graphs="actions") as pipeline:
        x, target = batch(0)
        losses = [torch.stack(pipeline.step(x, target=target)) for _ in range(4)]
    assert all(torch.equal(each, losses[0]) for each in losses)
    assert "cuda_graphs=actions on rank 0: 0F0 can't be captured" in caplog.text
