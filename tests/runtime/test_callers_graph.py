"""Tensors that require grad, given to step: their gradients, against plain autograd of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.tensors import drawn
from zbpp import Pipeline, per_microbatch, plan

SIZE, ROWS, M = 5, 8, 4


class Stage(nn.Module):
    """linear(x) + context, tanh."""

    def __init__(self, seed):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.copy_(drawn(SIZE, SIZE, seed=seed))
            self.linear.bias.copy_(drawn(SIZE, seed=100 + seed))

    def forward(self, x, context=0.0):
        x = x["x"] if isinstance(x, dict) else x
        return torch.tanh(self.linear(x) + context)


def plain(run):
    """What a backward of run(whole model) leaves, as {name: gradient} with the model's."""
    stages = [Stage(0), Stage(1)]
    run(lambda x, **keywords: stages[1](stages[0](x, **keywords), **keywords)).backward()
    return {f"{i}.{name}": p.grad for i, stage in enumerate(stages) for name, p in stage.named_parameters()}


def piped(schedule, run):
    stages = {0: Stage(0), 1: Stage(1)}
    run(Pipeline(stages, plan(schedule, 1, M, stages_per_rank=2), F.mse_loss))
    return {f"{i}.{name}": p.grad for i, stage in stages.items() for name, p in stage.named_parameters()}


@pytest.mark.parametrize("schedule", ["zb_v", "interleaved_1f1b"])
def test_a_module_before_the_pipeline_gets_its_gradient(schedule):
    """`step(front(x))`, in a tuple's place as well as nested; the front is gone through once."""
    found = []
    for call in (
        lambda model, y: F.mse_loss(model(y), drawn(ROWS, SIZE, seed=7)),
        lambda pipeline, y: pipeline.step({"x": y}, target=drawn(ROWS, SIZE, seed=7)),
    ):
        front, num_runs = Stage(9), []
        front.linear.weight.register_hook(lambda grad, num_runs=num_runs: num_runs.append(1))
        run = piped if found else plain
        arguments = (schedule,) if found else ()
        y = front(drawn(ROWS, SIZE, seed=8))
        found.append(run(*arguments, lambda model, y=y, call=call: call(model, y)))
        found[-1] |= {f"front.{name}": p.grad for name, p in front.named_parameters()}
        assert num_runs == [1]
    assert_close(found[1], found[0])


def of_leaves(x, context, shared, target, call):
    call(x, context + 0, shared, target)
    return {"x": x.grad, "context": context.grad, "shared": shared.grad, "target": target.grad}


def leaves():
    shapes = {"x": (ROWS, SIZE), "context": (ROWS, SIZE), "shared": (SIZE,), "target": (ROWS, SIZE)}
    return [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]


def test_leaves_and_graphs_in_arguments_keywords_and_target_get_their_gradients():
    def step(x, context, shared, target):
        stages = {0: Stage(0), 1: Stage(1)}
        pipeline = Pipeline(stages, plan("zb_v", 1, M), F.mse_loss)
        pieces = per_microbatch(list((context + shared).chunk(M)))  # a graph of M outputs
        pipeline.step(x, context=pieces, target=target)

    def plainly(x, context, shared, target):
        first, second = Stage(0), Stage(1)
        both = context + shared
        F.mse_loss(second(first(x, both), both), target).backward()

    found, expected = of_leaves(*leaves(), step), of_leaves(*leaves(), plainly)
    assert_close(found, expected)


def on_two_ranks(rank):
    stages, front = {rank: Stage(rank)}, Stage(9)
    pipeline = Pipeline(stages, plan("zb_h1", 2, M), F.mse_loss)
    y = front(drawn(ROWS, SIZE, seed=8))
    for _ in range(2):  # the second step has posted its receives ahead
        front.zero_grad()
        y = front(drawn(ROWS, SIZE, seed=8))
        pipeline.step(y, target=drawn(ROWS, SIZE, seed=7))
    return {name: p.grad for name, p in front.named_parameters() if p.grad is not None}


def test_a_module_before_the_pipeline_gets_its_gradient_on_the_owner_of_stage_0():
    first, second = run_ranks(on_two_ranks, 2)
    front = Stage(9)
    plain(lambda model: F.mse_loss(model(front(drawn(ROWS, SIZE, seed=8))), drawn(ROWS, SIZE, seed=7)))
    assert_close(first, {name: p.grad for name, p in front.named_parameters()})
    assert second == {}
