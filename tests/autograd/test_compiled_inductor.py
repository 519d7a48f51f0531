"""Compiled stages by Inductor: right, and in a pipeline the same to the last bit whatever the schedule."""

import copy

import pytest
import torch
from torch import nn

from helpers.compiler import needs_inductor
from helpers.split import assert_equals_plain, leaf
from zbpp import Pipeline, Timetable, backward_input
from zbpp.autograd.compiled import compile_stage
from zbpp.models.llama import Llama


class Small(nn.Module):
    """Each Inductor kernel takes g++ two seconds of a core; these are few."""

    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(torch.tanh(self.up(x)))


class Net(nn.Module):
    """An embedding with a padding index, a convolution, a norm with running statistics, dropout."""

    def __init__(self):
        super().__init__()
        self.rows, self.padded = nn.Embedding(20, 6), nn.Embedding(20, 6, padding_idx=1)
        self.conv, self.norm = nn.Conv1d(6, 8, 3, bias=False), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 20, bias=False)

    def forward(self, tokens):
        late = torch.rand(1, 20)  # drawn first, used last
        x = (self.rows(tokens) + self.padded(tokens)).transpose(1, 2)
        return self.head(self.drop(self.norm(self.conv(x))).transpose(1, 2)) * late


def llama():
    model = Llama(num_layers=3, hidden_size=16, num_heads=4, num_kv_heads=2, sequence_length=8)
    return model.build_stage(1, 3).to(torch.get_default_dtype())


def compiles_attention_in_float64():
    """torch 2.11 takes what attention keeps for float32: there torch.compile, too, fails in the backward."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kinds = [
        attend(*torch.empty(3, 1, 1, 1, 1, dtype=torch.float64, device=each)) for each in ("cpu", "meta")
    ]
    return kinds[0][1].dtype == kinds[1][1].dtype


GRADIENTS = {
    "small": (Small, lambda: leaf(2, 8), torch.float32),
    "llama": (
        llama,
        lambda: leaf(2, 8, 16),
        torch.float64 if compiles_attention_in_float64() else torch.float32,
    ),
    "net": (Net, lambda: torch.randint(20, (3, 7)), torch.float64),
}


@needs_inductor
@pytest.mark.parametrize(
    "name", ["small", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "net"))]
)
def test_inductors_code_gets_the_gradients_of_plain_autograd(name):
    make, make_inputs, dtype = GRADIENTS[name]
    modules = []

    def made():
        modules.append(make())
        if len(modules) == 2:
            compile_stage(modules[1])
        return modules[-1]

    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    options = {"tolerance": tolerance, "dtype": dtype, "count_products": False, "buffer_tolerance": 1e-12}
    assert_equals_plain(made, make_inputs, **options)


SCHEDULES = {
    "gpipe": "0F0 0F1 0F2 1F0 1F1 1F2 1BW0 1BW1 1BW2 0BW0 0BW1 0BW2",
    "one by one": "0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 0BW1 0F2 1F2 1BW2 0BW2",
    "late weights": "0F0 0F1 1F0 1B0 0B0 1F1 0F2 1B1 1F2 1B2 1W0 0B1 0B2 1W1 1W2 0W0 0W1 0W2",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def train(stages, row):
    """Losses and gradients of two steps."""
    stages = copy.deepcopy(stages)
    cache = {}
    for stage in stages:
        compile_stage(stage, cache=cache)
    pipeline = Pipeline(dict(enumerate(stages)), Timetable.parse(row), loss_fn=nn.functional.mse_loss)
    drawn = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        x, target = torch.randn(2, 6, 8, generator=drawn)
        found += pipeline.step(x, target=target)
    return [*found, *(parameter.grad for stage in stages for parameter in stage.parameters())]


@needs_inductor
@pytest.mark.parametrize("kind", [Small, pytest.param(Block, marks=pytest.mark.nightly)])
def test_schedules_of_one_cut_agree_to_the_last_bit(kind):
    torch.manual_seed(0)
    stages = [kind(), kind()]
    expected, *others = [train(stages, row) for row in SCHEDULES.values()]
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x):
        return torch.bmm(x, self.weight)


SUMMED = {
    "linear": (lambda: nn.Linear(8, 4), lambda: torch.randn(64, 8)),
    "batched": (Batched, lambda: torch.randn(3, 64, 8)),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=2), lambda: torch.randint(9, (64,))),
}


@pytest.mark.parametrize(
    "backend, when",  # when main_grad is set: before or after the first step, which compiles
    [pytest.param("inductor", "before", marks=needs_inductor), ("eager", "before"), ("eager", "after")],
)
@pytest.mark.parametrize("kind", SUMMED)
def test_a_main_grad_gets_products_that_are_not_rounded(kind, backend, when):
    """Each microbatch's product was rounded to 16 bits. The eager W's error is 1e-7, too."""
    torch.manual_seed(0)
    make, make_input = SUMMED[kind]
    module = make().bfloat16()
    exact = copy.deepcopy(module).double()
    compile_stage(module, backend=backend)
    for number in range(8):
        x = make_input()
        x, wide = (x, x) if x.dtype == torch.int64 else (x.bfloat16(), x.bfloat16().double())
        if number == (when == "after"):
            module.zero_grad()
            exact.zero_grad()
            for parameter in module.parameters():
                parameter.main_grad = torch.zeros(parameter.shape)
        y = module(x)
        dy = torch.randn(y.shape).to(y.dtype)
        _, weight_grads = backward_input(y, dy, ())
        weight_grads.accumulate()
        exact(wide).backward(dy.double())
    found = {name: each.main_grad for name, each in module.named_parameters()}
    assert all(each.grad is None for each in module.parameters())
    expected = exact.weight.grad
    most = 1e-6 if when == "before" else 4e-3  # a graph that was compiled for a .grad of 16 bits
    assert (found["weight"] - expected).abs().max() <= most * expected.abs().max()
