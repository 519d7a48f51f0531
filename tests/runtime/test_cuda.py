"""One process with several stages on a GPU. Not run anywhere yet: no GPU was to be had."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.split import assert_close
from zbpp import Pipeline, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
M, ROWS, SIZE = 4, 8, 16
SCHEDULES = ["1f1b", "zb_h1", "zb_v"]


def stage(dropout=0.0):
    layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.LayerNorm(SIZE), nn.Dropout(dropout))
    return layers.to("cuda", torch.float64)


def made(schedule, dropout=0.0):
    torch.manual_seed(0)
    timetable = plan(schedule, 1, M)
    stages = {index: stage(dropout) for index in range(timetable.num_stages)}
    x, target = (torch.randn(M * ROWS, SIZE, device="cuda", dtype=torch.float64) for _ in range(2))
    return Pipeline(stages, timetable, F.mse_loss), x, target


def gradients(stages):
    return {f"{i}.{name}": p.grad for i, each in stages.items() for name, p in each.named_parameters()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_plain_autograd(schedule):
    pipeline, x, target = made(schedule)
    pipeline.step(x, target=target)
    found = gradients(pipeline.stages)
    for each in pipeline.stages.values():
        each.zero_grad()
    y = x
    for each in pipeline.stages.values():
        y = each(y)
    F.mse_loss(y, target).backward()
    assert_close(found, gradients(pipeline.stages))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_host_never_waits_for_the_device_within_a_step(schedule):
    pipeline, x, target = made(schedule, dropout=0.5)
    pipeline.step(x, target=target)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = pipeline.step(x, target=target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == M
