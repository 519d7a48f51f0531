"""Post-validation against the synchronous run: the same losses and weights, to the last bit."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, PostValidation, clip_grad_norm_, plan
from zbpp.runtime.norm import gradients_of, scale_gradients

M, ROWS, WIDTH, STEPS = 8, 32, 6, 9
CLIP = 50.0
CLIPPED, INFINITE = (2, 3, 6), 5  # steps whose gradients are too large, and one that has no gradients


class Model:
    """Layers with dropout, whose seeds must come again, and with BatchNorm, whose statistics must go back."""

    def build_stage(self, index, num_stages):
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(8)
        ]
        mine = layers[len(layers) * index // num_stages : len(layers) * (index + 1) // num_stages]
        return nn.Sequential(*mine)

    def loss(self, output, target):
        return F.mse_loss(output, target)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    if step in CLIPPED:
        y = y * 1e4
    if step == INFINITE:
        y[ROWS // 2] = math.inf
    return x, y


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def synchronous(pipeline, optimizer, scheduler):
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        losses.append([each.item() for each in pipeline.step(x, target=y)])
        norm = clip_grad_norm_(pipeline, math.inf).item()
        if math.isfinite(norm):
            if norm > CLIP:
                scale_gradients(gradients_of(pipeline.parameters()), CLIP / norm)
            optimizer.step()
        scheduler.step()
        norms.append(norm)
    return losses, norms


def validated(pipeline, optimizer, scheduler):
    losses, norms = [], []
    steps = PostValidation(pipeline, optimizer, clip_norm=CLIP)
    for step in range(STEPS):
        x, y = batch(step)
        losses.append([each.item() for each in steps.step(x, target=y)])
        scheduler.step()
        if step:
            norms.append(steps.norm)
    steps.settle()
    assert steps.num_redone == len(CLIPPED) + 1
    return losses, [*norms, steps.norm]


def trained(rank, num_ranks, schedule, run, make=adamw, **options):
    """Losses and norms of a run, and the weights and buffers at its end."""
    model, timetable = Model(), plan(schedule, num_ranks, M)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    with Pipeline(stages, timetable, model.loss, **options) as pipeline:
        optimizer = make(pipeline.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses, norms = run(pipeline, optimizer, scheduler)
        return losses, norms, pipeline.state_dict(), optimizer.state_dict()


def assert_same(one, other):
    """Equal to the last bit, NaN equal to NaN."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other or (one != one and other != other)


def both(rank, num_ranks, schedules, **options):
    """Per schedule the synchronous run and the validated one."""
    return {
        schedule: [trained(rank, num_ranks, schedule, run, **options) for run in (synchronous, validated)]
        for schedule in schedules
    }


@pytest.mark.parametrize("num_ranks, schedules", [(1, ["1f1b", "zb_v"]), (2, ["zb_h1", "zb_v"])])
def test_forced_clips_and_a_forced_inf_give_the_synchronous_runs_losses(num_ranks, schedules):
    if num_ranks == 1:
        everyone = [both(0, 1, schedules)]
    else:
        everyone = run_ranks(both, num_ranks, num_ranks, schedules)
    for found in everyone:
        for schedule in schedules:
            expected, got = found[schedule]
            norms = dict(enumerate(expected[1]))
            assert [step for step in norms if CLIP < norms[step] < math.inf] == [*CLIPPED]
            assert [step for step in norms if not math.isfinite(norms[step])] == [INFINITE]
            assert_same(expected, got)
