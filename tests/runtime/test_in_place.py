"""Memory that a later action overwrites before it is read: plain autograd's numbers, or ChangedInPlace.

Plain autograd finishes a microbatch before the next one begins; a pipeline has several under way.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.tensors import drawn
from zbpp import GradientRelease, Pipeline, Timetable, plan, replicate
from zbpp.autograd.weight_grads import ChangedInPlace

M, SIZE = 6, 4
ROWS = M * 2


def linear(seed):
    layer = nn.Linear(SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(drawn(SIZE, SIZE, seed=seed))
        layer.bias.copy_(drawn(SIZE, seed=seed + 50))
    return layer


class IntoWorkspace(torch.autograd.Function):
    """tanh, whose backward writes the gradient into memory that it is given."""

    @staticmethod
    def forward(ctx, x, workspace):
        ctx.workspace = workspace
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        with torch.no_grad():
            return ctx.workspace.copy_(dy * (1 - y * y)), None


class First(nn.Module):
    """Returns its layer's output and a mask, which `kind` keeps somewhere."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, linear(1)
        self.register_buffer("mask", torch.ones(2, SIZE, dtype=torch.float64))
        self.cache = torch.ones(2, SIZE, dtype=torch.float64)
        self.table = nn.Parameter(torch.ones(4, SIZE, dtype=torch.float64), requires_grad=False)

    def forward(self, x, shared):
        y, mask = self.layer(x), (x > 0).double()
        with torch.no_grad():
            match self.kind:
                case "buffer" | "copied buffer":
                    self.mask.copy_(mask)
                    mask = self.mask.clone() if self.kind == "copied buffer" else self.mask
                case "attribute":
                    self.cache.mul_(0).add_(mask)
                    mask = self.cache
                case "view of a parameter":
                    self.table[1:3].copy_(mask)
                    mask = self.table[1:3]
                case "the step's input":
                    shared.copy_(mask)
                    mask = shared
                case "constant buffer":
                    mask = self.mask
        return y, mask


class Second(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.is_written = linear(2), kind == "gradient"
        self.register_buffer("workspace", torch.empty(2, SIZE, dtype=torch.float64))

    def forward(self, y, mask):
        if self.is_written:
            y = IntoWorkspace.apply(y, self.workspace)
        return self.layer(y * 2) + mask  # saves no mask: only the message itself can be wrong


FINE = ["fresh", "constant buffer", "copied buffer"]
OVERWRITTEN = {
    "buffer": "stage 0 .* buffer mask of stage 0",
    "attribute": "stage 0 .* attribute cache of stage 0",
    "view of a parameter": "stage 0 .* parameter table of stage 0",
    "the step's input": "stage 0 .* an input of the step",
    "gradient": "stage 1 .* buffer workspace of stage 1",
}


def batch():
    return drawn(ROWS, SIZE, seed=8), drawn(ROWS, SIZE, seed=9)


def plain(kind):
    stages = [First(kind), Second(kind)]
    shared = torch.ones(2, SIZE, dtype=torch.float64)
    losses = []
    for x, target in zip(*(each.split(2) for each in batch()), strict=True):
        loss = F.mse_loss(stages[1](*stages[0](x, shared)), target)
        (loss / M).backward()
        losses.append(loss.item())
    return losses, {f"{s}.{name}": p.grad for s, each in enumerate(stages) for name, p in grads_of(each)}


def grads_of(stage):
    return [(name, p) for name, p in stage.named_parameters() if p.grad is not None]


def outcome(rank, timetable, kind):
    """(losses, gradients) of this rank, or what the error says."""
    stages = {0: First(kind), 1: Second(kind)}
    mine = {index: stages[index] for index in timetable.stages_of(rank)}
    shared = torch.ones(2, SIZE, dtype=torch.float64)
    x, target = batch()
    try:
        pipeline = Pipeline(mine, timetable, F.mse_loss)
        losses = pipeline.step(x, replicate(shared), target=target)
    except RuntimeError as error:  # another rank has lost its messages
        return type(error).__name__, str(error)
    found = {f"{s}.{name}": p.grad for s, each in mine.items() for name, p in grads_of(each)}
    return [loss.item() for loss in losses], found


def assert_equals_plain(results, kind):
    losses, grads = plain(kind)
    assert [loss for found, _ in results for loss in found] == pytest.approx(losses, rel=1e-12)
    assert_close({name: each for _, found in results for name, each in found.items()}, grads)


def run_all(rank, kinds):
    schedules = ["gpipe", "1f1b", "zb_h1", "zb_h2"]
    return {(name, kind): outcome(rank, plan(name, 2, M), kind) for name in schedules for kind in kinds}


def test_sent_memory_that_is_overwritten_is_named_and_all_else_arrives_as_it_was():
    results = run_ranks(run_all, 2, [*FINE, *OVERWRITTEN])
    for case in results[0]:
        found, kind = [rank[case] for rank in results], case[1]
        if kind in FINE:
            assert_equals_plain(found, kind)
        else:
            texts = dict(found)
            assert re.search(OVERWRITTEN[kind] + ".*clone", texts["ChangedInPlace"]), (case, found)


IN_TURN = ["zb_v", "interleaved_zb"]  # on one rank they consume a value before the next one is made


@pytest.mark.parametrize("kind", [*FINE, *OVERWRITTEN])
@pytest.mark.parametrize("schedule", ["looped_bfs", *IN_TURN])
def test_between_stages_of_one_rank_a_value_is_what_its_stage_returned(schedule, kind):
    result = outcome(0, plan(schedule, 1, M, stages_per_rank=2), kind)
    if kind in FINE or schedule in IN_TURN:
        assert_equals_plain([result], kind)
    else:
        name, text = result
        assert name == "ChangedInPlace"
        assert re.search(OVERWRITTEN[kind] + ".*clone", text), text


def test_under_inference_mode_an_evaluation_has_the_losses_of_one_under_no_grad():
    """Tensors that are made there have no count of changes."""
    pipeline = Pipeline({0: First("fresh"), 1: Second("fresh")}, plan("zb_v", 1, M), F.mse_loss)
    (x, target), shared = batch(), replicate(torch.ones(2, SIZE, dtype=torch.float64))
    expected = pipeline.evaluate(x, shared, target=target)
    with torch.inference_mode():
        assert pipeline.evaluate(x, shared, target=target) == expected


class Embedding(nn.Module):
    """Returns a weight, too: a message carries it, and an update inside the step writes it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(drawn(8, SIZE, seed=4))

    def forward(self, t):
        return self.table[t], self.table


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(5)

    def forward(self, h, table):
        return self.layer(h), table


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(6)

    def forward(self, h, table):
        return self.layer(h) @ table.t()


def train(rank, names, is_released):
    """Per schedule the losses of 3 steps, updated inside the steps or behind them."""
    found = {}
    for name, stages_per_rank in names.items():
        timetable = plan(name, 2, 4, stages_per_rank=stages_per_rank)
        middle = [Passing() for _ in range(timetable.num_stages - 2)]
        stages = [Embedding(), *middle, Logits()]
        mine = {index: stages[index] for index in timetable.stages_of(rank)}
        parameters = [each for stage in mine.values() for each in stage.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        extras = [GradientRelease(optimizer)] if is_released else []
        pipeline = Pipeline(mine, timetable, cross_entropy, extras=extras)
        tokens = torch.arange(8).view(8, 1)
        losses = []
        for _ in range(3):
            losses += [loss.item() for loss in pipeline.step(tokens, target=tokens.flip(0))]
            optimizer.step()
            optimizer.zero_grad()
        found[name] = losses
    return found


def cross_entropy(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_an_update_inside_the_step_may_write_a_weight_that_messages_have_carried():
    """Losses equal those of updates behind the step; zb_v passes the weight on from a later stage."""
    names = {"1f1b": 1, "zb_h1": 1, "zb_v": 2, "interleaved_1f1b": 2}
    assert run_ranks(train, 2, names, True) == run_ranks(train, 2, names, False)


# ---------------------------------------------------------------- what B and W read


class Scaled(nn.Module):
    """A buffer that each forward writes; `use` says where a product saves it."""

    def __init__(self, use):
        super().__init__()
        self.use, self.layer = use, linear(1)
        self.register_buffer("scale", torch.ones(2, SIZE, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(1.5)
        match self.use:
            case "saved":
                return self.layer(x) * self.scale
            case "view":
                return self.layer(x) * self.scale[0]
            case "input of the layer":
                return self.layer(self.scale) + x
            case "product with the weight":
                return x @ (self.layer.weight * self.scale[0])


@pytest.mark.parametrize("use", ["saved", "view", "input of the layer", "product with the weight"])
@pytest.mark.parametrize("row", ["0F0 0F1 0BW0 0BW1", "0F0 0B0 0F1 0W0 0B1 0W1"])
def test_a_buffer_that_forward_writes_between_f_and_b_or_w_is_named(row, use):
    x = drawn(4, SIZE, seed=3)
    pipeline = Pipeline({0: Scaled(use)}, Timetable.parse(row), F.mse_loss)
    is_right = row.startswith("0F0 0B0") and use in ("saved", "view")  # W does not read the buffer
    if is_right:
        pipeline.step(x, target=x)
        return
    with pytest.raises(ChangedInPlace, match="clone") as caught:
        pipeline.step(x, target=x)
    assert "buffer scale of stage 0" in "\n".join([str(caught.value), *caught.value.__notes__])


class PlainMistake(nn.Module):
    """Code that plain autograd refuses, too, with a buffer and a weight that were written as often."""

    def __init__(self):
        super().__init__()
        self.layer = linear(1)
        self.register_buffer("mask", torch.empty(3, 3).fill_(0).fill_(1))

    def forward(self, x):
        y = self.layer(x).sigmoid()
        y.add_(1).add_(1)
        return y


@pytest.mark.parametrize(
    "rows", [2, 2 * SIZE]
)  # of a microbatch: another shape than the weight's, or the same
def test_a_mistake_that_plain_autograd_refuses_has_its_error(rows):
    x = drawn(rows, SIZE, seed=3)
    with pytest.raises(RuntimeError, match="output 0 of Sigmoid") as plain_error:
        PlainMistake()(x[: rows // 2]).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        Pipeline({0: PlainMistake()}, "1f1b", F.mse_loss, num_microbatches=2).step(x, target=x)
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == str(plain_error.value)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(1)
        self.register_buffer("mask", torch.empty(3, 3).fill_(0).fill_(1))

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(2)
        return torch.tanh(x @ self.layer.weight.t()[:, :3])


def test_a_weight_that_forward_writes_is_named_by_its_views():
    x = drawn(4, SIZE, seed=3).requires_grad_()
    with pytest.raises(ChangedInPlace, match="parameter layer.weight of stage 0") as caught:
        Pipeline({0: Doubled()}, Timetable.parse("0F0 0F1 0BW0 0BW1"), F.mse_loss).step(x, target=x[:, :3])
    assert "mask" not in str(caught.value)
