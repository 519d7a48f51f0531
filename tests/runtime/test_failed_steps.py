"""What a step that fails leaves: nothing of its gradients, or a mark on those that it added to."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from zbpp import Pipeline, plan

SIZE, M = 4, 4
PARTIAL = "gradients hold a part of a step that failed: zero or drop them on every rank"


class Fails(nn.Module):
    """A linear layer that raises in one of its forwards."""

    def __init__(self, seed, fails_at=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        self.fails_at, self.num_calls = fails_at, 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise KeyError("planted")
        return torch.tanh(self.linear(x))


def batch():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(M * 2, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))


def gradients(stages):
    return {f"{i}.{n}": p.grad for i, stage in stages.items() for n, p in stage.named_parameters()}


def pipeline_of(fails_at):
    stages = {0: Fails(0), 1: Fails(1, fails_at)}
    return stages, Pipeline(stages, plan("interleaved_1f1b", 1, M, stages_per_rank=2), F.mse_loss)


def test_a_step_retried_after_a_failure_gives_the_gradients_of_one_step():
    """In the third microbatch, when the first has had its W: half of the gradients were in `.grad`."""
    x, target = batch()
    (right, good), (stages, pipeline) = pipeline_of(0), pipeline_of(M)
    good.step(x, target=target)
    with pytest.raises(KeyError) as caught:
        pipeline.step(x, target=target)
    (where,) = caught.value.__notes__
    assert where == "in 1F3 (F, the forward, of stage 1, microbatch 3) on rank 0"
    assert set(gradients(stages).values()) == {None}
    assert pipeline.num_steps == 0
    pipeline.step(x, target=target)
    assert pipeline.num_steps == 1
    assert_close(gradients(stages), gradients(right), tolerance=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_accumulated_gradient_that_holds_a_part_of_a_failed_step_is_refused_until_it_is_zeroed(
    set_to_none,
):
    x, target = batch()
    (right, good), (stages, pipeline) = pipeline_of(0), pipeline_of(M + M)
    pipeline.step(x, target=target)
    with pytest.raises(KeyError) as caught:
        pipeline.step(x, target=target)
    assert caught.value.__notes__[1].startswith(
        "4 gradients that were there before this step now hold a part"
    )
    for again in (pipeline, Pipeline(stages, pipeline.timetable, F.mse_loss)):  # a new one knows, too
        with pytest.raises(RuntimeError, match=PARTIAL):
            again.step(x, target=target)
    for stage in stages.values():
        stage.zero_grad(set_to_none=set_to_none)
    pipeline.step(x, target=target)
    good.step(x, target=target)
    assert_close(gradients(stages), gradients(right), tolerance=0)


def test_a_main_grad_that_holds_a_part_of_a_failed_step_is_refused_until_it_is_zeroed():
    x, target = batch()
    stages, pipeline = pipeline_of(M)
    for p in pipeline.parameters():
        p.main_grad = torch.zeros_like(p)
    with pytest.raises(KeyError):
        pipeline.step(x, target=target)
    with pytest.raises(RuntimeError, match=PARTIAL):
        pipeline.step(x, target=target)
    for p in pipeline.parameters():
        p.main_grad.zero_()
    pipeline.step(x, target=target)
    right, good = pipeline_of(0)
    good.step(x, target=target)
    found = {f"{i}.{n}": p.main_grad for i, stage in stages.items() for n, p in stage.named_parameters()}
    assert_close(found, gradients(right))


def test_a_loss_functions_own_parameters_are_restored_too():
    class Weighted(Fails):
        def forward(self, output, target):
            return F.mse_loss(super().forward(output), target)

    loss_fn, (x, target) = Weighted(2, M), batch()
    pipeline = Pipeline({0: Fails(0)}, plan("1f1b", 1, M), loss_fn)
    with pytest.raises(KeyError):
        pipeline.step(x, target=target)
    assert loss_fn.linear.weight.grad is None


def test_an_evaluation_that_fails_leaves_gradients_alone():
    x, target = batch()
    stages, pipeline = pipeline_of(M + 1)
    pipeline.step(x, target=target)
    before = {name: grad.clone() for name, grad in gradients(stages).items()}
    with pytest.raises(KeyError):
        pipeline.evaluate(x, target=target)
    assert_close(gradients(stages), before, tolerance=0)
    pipeline.step(x, target=target)


def on_two_ranks(rank, accumulates):
    """The last rank's forward fails in the first step, or in the second; then a new Pipeline tries again."""
    stages = {rank: Fails(rank, M * (1 + accumulates) if rank == 1 else 0)}
    (x, target), timetable, told = batch(), plan("zb_h1", 2, M), []
    pipeline = Pipeline(stages, timetable, F.mse_loss)
    if accumulates:
        pipeline.step(x, target=target)
    for _ in range(1 + accumulates):
        with pytest.raises(Exception) as caught:
            pipeline.step(x, target=target)
        told.append([type(caught.value).__name__, *getattr(caught.value, "__notes__", [])])
        pipeline = Pipeline(stages, timetable, F.mse_loss)
    if accumulates:
        stages[rank].zero_grad()
    pipeline.step(x, target=target)
    return told, gradients(stages)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_new_pipeline_on_every_rank_gives_the_gradients_of_one_step(accumulates):
    (told, first), (of_last, second) = run_ranks(on_two_ranks, 2, accumulates)
    assert (told[0][0], of_last[0][0]) == ("CommunicationError", "KeyError")
    if accumulates:  # refused on a rank that has a part of the step, and with it on the other
        assert "RuntimeError" in (told[1][0], of_last[1][0])
    right, good = {0: Fails(0), 1: Fails(1)}, None
    good = Pipeline(right, plan("interleaved_1f1b", 1, M, stages_per_rank=2), F.mse_loss)
    x, target = batch()
    good.step(x, target=target)
    assert_close(first | second, gradients(right), tolerance=0)
