"""Recorder, an extra that measures steps; Pipeline.with_timetable."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, plan

M, SIZE = 4, 4


def pipeline_of(schedule, rank=0, num_ranks=1):
    torch.manual_seed(0)
    timetable = plan(schedule, num_ranks, M)
    everything = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.3)) for _ in range(timetable.num_stages)]
    return Pipeline({stage: everything[stage] for stage in timetable.stages_of(rank)}, timetable, F.mse_loss)


def step(pipeline):
    return pipeline.step(torch.ones(2 * M, SIZE), target=torch.zeros(2 * M, SIZE))


# ---------------------------------------------------------------- with_timetable


def change_after_one_step(rank):
    """Losses and gradients of two steps: under 1f1b and then zb_h1, and both under zb_h1."""
    changed, same = pipeline_of("1f1b", rank, 2), pipeline_of("zb_h1", rank, 2)
    losses = step(changed)
    old, changed = changed, changed.with_timetable(plan("zb_h1", 2, M))
    losses += step(changed)
    with pytest.raises(RuntimeError, match="the pipeline was closed: make a new Pipeline"):
        step(old)
    expected = step(same) + step(same)
    assert (changed.num_steps, changed.timetable) == (2, same.timetable)
    for mine, theirs in zip(changed.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    return [loss.item() for loss in losses], [loss.item() for loss in expected]


def test_another_timetable_goes_on_with_the_same_dropout_and_stages():
    (_, _), (losses, expected) = run_ranks(change_after_one_step, 2)
    assert len(losses) == 2 * M
    assert losses == expected


def test_a_timetable_that_places_stages_elsewhere_is_refused_and_closes_nothing():
    pipeline = pipeline_of("zb_v")
    with pytest.raises(
        ValueError, match=r"on other ranks than this pipeline's: rank_of \[0\] instead of \[0, 0\]"
    ):
        pipeline.with_timetable(plan("zb_h1", 1, M))
    assert len(step(pipeline)) == M
