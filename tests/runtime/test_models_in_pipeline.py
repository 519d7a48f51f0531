"""Models of every kind as two stages, in two real processes and in one, against plain autograd.

Each model is a function that makes its two stages, and a batch; zb_h1 puts one stage on each of two
ranks, zb_v both on one.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close, float64
from helpers.tensors import drawn
from zbpp import Pipeline, plan

M, ROWS = 4, 8


def mean_square(output, target):
    """Of whatever the last stage puts out: a tensor, a tuple with losses of its own, a mapping."""
    if isinstance(output, tuple):
        output, extra = output
        return F.mse_loss(output, target) + extra
    return F.mse_loss(output, target)


class Stage(nn.Module):
    """A forward given as a function of the module and its inputs."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


# ---------------------------------------------------------------- models: stages, inputs, target, kwargs


def convnet():
    """The last stage starts in place; the first one's norm counts each microbatch once."""
    first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
    last = nn.Sequential(nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))  # fmt: skip
    return [first, last], (drawn(ROWS, 2, 5, 5),), drawn(ROWS, 6, seed=1), {}


def experts():
    """Each microbatch routes its rows as they are; some experts get none."""

    def route(self, x):
        scores, chosen = self.router(x).softmax(-1).max(-1)
        y = x.clone()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows, None])
        return y

    def stage():
        return Stage(route, router=nn.Linear(6, 4), experts=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))

    return [stage(), stage()], (drawn(ROWS, 6),), drawn(ROWS, 6, seed=1), {}


def tuples_at_the_boundary():
    """A view, an integer, one without grad, one that only a loss uses; all cross."""

    def first(self, x):
        y = self.linear(x)
        return y.view(-1, 2, 3), y.argmax(-1), x * 2, self.gate(x).sigmoid()

    def last(self, views, chosen, constant, gate):
        y = self.linear(views.flatten(1)) * gate + constant
        return y + F.one_hot(chosen, 6), gate.square().mean()

    stages = [Stage(first, linear=nn.Linear(6, 6), gate=nn.Linear(6, 6)), Stage(last, linear=nn.Linear(6, 6))]
    return stages, (drawn(ROWS, 6),), drawn(ROWS, 6, seed=1), {}


def several_inputs():
    """Tokens and floats; the first stage starts in place on a view."""

    def first(self, tokens, x):
        y = self.embedding(tokens).mean(1)
        return y.add_(self.linear(x))

    def last(self, x):
        return self.linear(x.mul_(2).view(-1, 6))

    stages = [Stage(first, embedding=nn.Embedding(11, 6, padding_idx=0), linear=nn.Linear(3, 6)),
              Stage(last, linear=nn.Linear(6, 6))]  # fmt: skip
    tokens = torch.randint(11, (ROWS, 4), generator=torch.Generator().manual_seed(0))
    return stages, (tokens, drawn(ROWS, 3)), drawn(ROWS, 6, seed=1), {}


def frozen_upstream():
    """Nothing to train in the first stage: no gradient comes back to it."""
    first = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
    return (
        [first, nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))],
        (drawn(ROWS, 6),),
        drawn(ROWS, 6, seed=1),
        {},
    )


MODELS = [convnet, experts, tuples_at_the_boundary, several_inputs, frozen_upstream]


# ---------------------------------------------------------------- run


def made(model):
    with float64():
        torch.manual_seed(0)
        return model()


def gradients(stages):
    """And buffers: a batch norm's statistics."""
    found = {}
    for index, stage in stages.items():
        found |= {f"{index}.{n}": p.grad for n, p in stage.named_parameters() if p.grad is not None}
        found |= {f"{index}.{n}": buffer.double() for n, buffer in stage.named_buffers()}
    return found


def piped(rank, model, schedule, num_ranks):
    """(losses, gradients) of this rank after one step."""
    stages, inputs, target, kwargs = made(model)
    timetable = plan(schedule, num_ranks, M)
    mine = {index: stages[index] for index in timetable.stages_of(rank)}
    pipeline = Pipeline(mine, timetable, mean_square)
    losses = pipeline.step(
        *(inputs if 0 in mine else ()), target=target if len(stages) - 1 in mine else None, **kwargs
    )
    return [loss.item() for loss in losses], gradients(mine)


def all_piped(rank, schedule, num_ranks):
    """Every model, one after another: starting processes is what takes the time."""
    return {model.__name__: piped(rank, model, schedule, num_ranks) for model in MODELS}


def plain(model):
    """Microbatch after microbatch in one process, loss.backward()."""
    stages, inputs, target, kwargs = made(model)
    losses = []
    for microbatch in range(M):
        rows = slice(microbatch * ROWS // M, (microbatch + 1) * ROWS // M)
        own = {
            name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()
        }
        x = tuple(value[rows] for value in inputs)
        for stage in stages:
            x = stage(*(x if isinstance(x, tuple) else (x,)), **own)
        loss = mean_square(x, target[rows])
        (loss / M).backward()
        losses.append(loss.item())
    return losses, gradients(dict(enumerate(stages)))


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(all_piped, 2, "zb_h1", 2)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_two_ranks_train_a_model_as_plain_autograd_does(model, on_two_ranks):
    """And one rank with both stages, to the last bit."""
    (_, first), (losses, last) = (each[model.__name__] for each in on_two_ranks)
    expected_losses, expected = plain(model)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert_close(first | last, expected)
    on_one_losses, on_one = piped(0, model, "zb_v", 1)
    assert losses == on_one_losses
    assert_close(first | last, on_one, tolerance=0)
