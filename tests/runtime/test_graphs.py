"""Captured steps beside eager ones, on an emulation of CUDA graphs (helpers.graph_maker).

Both run the same steps; losses, gradients, weights and buffers must be equal to the last bit.
"""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.graph_maker import EmulatedGraphs
from helpers.processes import run_ranks
from zbpp import Pipeline, auxiliary_loss, plan, replicate
from zbpp.families import FAMILIES

SIZE, M, STEPS = 8, 4, 6  # two eager steps, one capture, three more


class Block(nn.Module):
    """What makes a capture hard: dropout, statistics, a residual, a frozen weight, a weight used twice."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.BatchNorm1d(SIZE)
        self.frozen = nn.Parameter(torch.randn(SIZE), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        hidden = F.dropout(F.gelu(self.first(x)), 0.5, self.training)
        return x + self.norm(self.second(self.second(hidden))) * self.frozen


def mean_square(output, target):
    return F.mse_loss(output, target)


def stages_of(timetable, rank, make=Block):
    return {s: make(s) for s in range(timetable.num_stages) if timetable.rank_of[s] == rank}


def batch(number, rows=M * 2):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, SIZE, generator=generator), torch.randn(rows, SIZE, generator=generator)


def state_of(modules):
    found = [each.detach().clone() for module in modules for each in module.state_dict().values()]
    return found + [
        None if each.grad is None else each.grad.clone() for module in modules for each in module.parameters()
    ]


def trained(
    mode, stages, timetable, rank=0, steps=STEPS, loss_fn=mean_square, to_none=True, before=None, **kw
):
    """(losses and gradients of every step with the state at the end, the pipeline's StepGraphs)."""
    found, maker = [], EmulatedGraphs()
    with Pipeline(stages, timetable, loss_fn, seed=3, **kw) as pipeline:
        pipeline._engine.use_graphs(mode, maker)
        graphs = pipeline._engine.graphs
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for number in range(steps):
            if before is not None:
                before(number, pipeline)
            x, y = batch(number)
            maker.poison()
            losses = pipeline.step(
                *([x] if rank == 0 else []), **({"target": y} if timetable.rank_of[-1] == rank else {})
            )
            found += [*losses, *pipeline.step_losses.means().items(), *state_of(stages.values())]
            if number != 4:  # gradients of two steps are summed once
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        found += state_of(stages.values())
    return found, graphs


def is_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a == b) if not isinstance(a, torch.Tensor) else torch.equal(a, b)


def check(mode, schedule, *, make=Block, captures=1, num_ranks=1, **kw):
    timetable = plan(schedule, num_ranks, M)
    eager, _ = trained("none", stages_of(timetable, 0, make), timetable, **kw)
    captured, graphs = trained(mode, stages_of(timetable, 0, make), timetable, **kw)
    is_same(eager, captured)
    assert not graphs.stopped and graphs.num_captures == captures
    return graphs


@pytest.mark.parametrize("mode", ["actions", "program"])
@pytest.mark.parametrize("schedule", sorted(FAMILIES))
def test_replayed_steps_equal_eager_ones(mode, schedule):
    graphs = check(mode, schedule)
    assert graphs.num_replays == STEPS - 2
