"""Steps of a pipeline whose CUDA graphs are emulated, beside eager ones: see graph_maker."""

import torch
from torch import nn
from torch.nn import functional as F

from helpers.graph_maker import EmulatedGraphs
from zbpp import CudaGraphs, Pipeline, plan

SIZE, M, STEPS = 8, 4, 6  # two eager steps, one that is captured and replayed, three more replays


class Block(nn.Module):
    """What makes a capture hard: dropout, statistics, a weight used twice, a frozen one, an unused one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.BatchNorm1d(SIZE)
        self.frozen = nn.Parameter(torch.randn(SIZE), requires_grad=False)
        self.unused, self.rate = nn.Parameter(torch.randn(SIZE)), 0.5

    def forward(self, x, **_):
        hidden = F.dropout(F.gelu(self.first(x)), self.rate, self.training)
        return x + self.norm(self.second(self.second(hidden))) * self.frozen


def batch(number, rows=M * 2):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, SIZE, generator=generator), torch.randn(rows, SIZE, generator=generator)


def arguments(number):
    x, y = batch(number)
    return (x,), y, {}


def state_of(modules):
    found = [each.detach().clone() for module in modules for each in module.state_dict().values()]
    grads = [each.grad for module in modules for each in module.parameters()]
    return found + [None if each is None else each.detach().clone() for each in grads]


class Run:
    """Steps of a pipeline whose graphs are emulated. found: all that the steps gave.

    given: of a step's number, its (inputs, target, keywords). before: called with number and pipeline.
    """

    def __init__(
        self, has_graphs, schedule, *, make=Block, loss_fn=F.mse_loss, num_ranks=1, rank=0, **options
    ):
        self.timetable = plan(schedule, num_ranks, M) if isinstance(schedule, str) else schedule
        owned = [s for s, owner in enumerate(self.timetable.rank_of) if owner == rank]
        self.stages, self.rank, self.found = {s: make(s) for s in owned}, rank, []
        self.maker = EmulatedGraphs()
        self.graphs = CudaGraphs(self.maker)
        extras = [self.graphs] if has_graphs else []
        self.pipeline = Pipeline(self.stages, self.timetable, loss_fn, seed=3, extras=extras, **options)
        self.optimizer = torch.optim.SGD(self.pipeline.parameters(), lr=0.1, momentum=0.9)

    def steps(self, numbers=range(STEPS), *, given=arguments, before=None, to_none=True):
        for number in numbers:
            if before is not None:
                before(number, self.pipeline)
            self.maker.poison()
            self.step(*given(number))
            if number != 4:  # the gradients of two steps are summed once
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=to_none)
        self.found += state_of(self.stages.values())
        self.pipeline.close()
        return self

    def step(self, args, target, kwargs):
        losses = self.pipeline.step(
            *(args if self.rank == 0 else ()),
            target=target if self.rank == self.timetable.rank_of[-1] else None,
            **kwargs,
        )
        self.found += [*losses, self.pipeline.step_losses.means(), *state_of(self.stages.values())]


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def captured(schedule="zb_h1", *, steps=None, **options):
    """A run with graphs, whose steps gave what a run without gave."""
    eager = Run(False, schedule, **options).steps(**(steps or {}))
    found = Run(True, schedule, **options).steps(**(steps or {}))
    assert_same(eager.found, found.found)
    return found
