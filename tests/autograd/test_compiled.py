"""Compiled stages against plain autograd. The three graphs are cut as for Inductor, and run as they are."""

import copy
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpp
from helpers.split import CountCalls, assert_close, assert_equals_plain, call_module, grads_of, leaf
from zbpp.autograd import backward_input, explain
from zbpp.autograd.compiled import compile_stage, compiled_forward
from zbpp.autograd.weight_grads import leaves_of
from zbpp.models.llama import Llama


def llama(index=1, num_stages=3, **sizes):
    sizes = {"num_layers": num_stages, "hidden_size": 16, "num_heads": 4, "sequence_length": 8} | sizes
    return Llama(vocab_size=20, **sizes).build_stage(index, num_stages).to(torch.get_default_dtype())


def equals_plain(make_module, make_inputs, call=call_module, *, how=None, **options):
    """As `assert_equals_plain`, whose split side is compiled here; nothing may stay eager."""
    is_plain = True

    def make():
        nonlocal is_plain
        module = make_module()
        if not is_plain:
            compile_stage(module, backend="eager", **(how or {}))
        is_plain = False
        return module

    return assert_equals_plain(make, make_inputs, call, **({"buffer_tolerance": 1e-12} | options))


@pytest.fixture
def retreats(caplog):
    """The lines about what stays eager."""
    return lambda: [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _everything_is_compiled(request, caplog):
    yield
    said = [each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.WARNING]
    assert "retreats" in request.function.__code__.co_varnames or said == []


class Experts(nn.Module):
    """Batched weights, and frozen ones."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 6))
        self.down = nn.Parameter(torch.randn(3, 6, 8))
        self.frozen, self.norm = nn.Linear(8, 8).requires_grad_(False), nn.LayerNorm(8)

    def forward(self, x):
        hidden = torch.einsum("bth,ehk->betk", self.frozen(self.norm(x)), self.up)
        return torch.einsum("betk,ekh->bth", F.gelu(hidden), self.down) + x.roll(1, 1)


class Columns(nn.Module):
    """As many tokens as numbers in each: rows in place of columns would not be seen by their shape."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight.T)


class Passing(nn.Module):
    """Returns an input, a parameter, a view, and the same twice."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = self.linear(x) * self.scale
        return y, x, self.scale, y[1:], y, y.argmax(-1), None


class Branches(nn.Module):
    """Returns what a function makes of the input and of a normed projection of the input."""

    def __init__(self, branch):
        super().__init__()
        self.linear, self.norm, self.branch = nn.Linear(4, 4), nn.LayerNorm(4), branch

    def forward(self, x):
        return self.branch(x, self.norm(x), self.linear(x))


def without_gradients(x, h, y):
    with torch.no_grad():
        return y, torch.tanh(y), y * 1


BRANCHES = {
    "a stop-gradient branch": lambda x, h, y: (y, y.detach()),
    "a stop-gradient branch first": lambda x, h, y: (y.detach(), y),
    "two of them around a norm": lambda x, h, y: (h.detach(), h, h.detach()),
    "copies of both": lambda x, h, y: (y, y.detach().clone(), y.clone(), y.view(-1), y.detach().view(-1)),
    "one tensor twice": lambda x, h, y: (y, y, h.detach(), y),
    "copies of the input": lambda x, h, y: (y, x.clone().view(-1), x.detach().clone().view(-1), x),
    "chunks": lambda x, h, y: (*y.chunk(2, -1), *y.detach().chunk(2, -1), h),
    "integers": lambda x, h, y: (h, h.argmax(-1), h > 0, h.argmax(-1)),
    "without gradients": without_gradients,
}


MODELS = {
    "the first stage of a Llama": (lambda: llama(0), lambda: torch.randint(20, (2, 8))),
    "a middle one": (llama, lambda: leaf(2, 8, 16)),
    "the last one": (lambda: llama(2, num_kv_heads=2), lambda: leaf(2, 8, 16)),
    "batched weights": (Experts, lambda: leaf(2, 5, 8)),
    "an embedding by columns": (Columns, lambda: torch.randint(8, (2, 5))),
    "what it is given": (Passing, lambda: leaf(3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_module_gets_the_gradients_of_plain_autograd(name):
    equals_plain(*MODELS[name])


@pytest.mark.parametrize("name", BRANCHES)
def test_each_of_several_outputs_requires_grad_if_it_does_in_plain_autograd(name):
    equals_plain(lambda: Branches(BRANCHES[name]), lambda: leaf(2, 3, 4))


@pytest.mark.parametrize("name", BRANCHES)
def test_an_output_is_changed_without_changing_another_one_where_plain_outputs_can_be(name):
    def shared(is_compiled):
        module, x = Branches(BRANCHES[name]), leaf(2, 3, 4)
        if is_compiled:
            compile_stage(module, backend="eager")
        tensors = [*module(x), x, *module.parameters()]
        owners = [each.untyped_storage().data_ptr() for each in tensors]
        return {(i, j) for j, _ in enumerate(owners) for i in range(j) if owners[i] == owners[j]}

    assert shared(is_compiled=True) <= shared(is_compiled=False)


@pytest.mark.parametrize("budget", [0.0, pytest.param(0.5, marks=pytest.mark.nightly)])
def test_a_budget_keeps_less_between_f_and_b_and_the_same_masks(budget):
    def make():
        return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8))

    options = {"count_products": False}  # more of them: that is the bargain
    equals_plain(make, lambda: leaf(2, 5, 8), how={"budget": budget}, **options)
    assert kept_bytes(llama(), budget) < kept_bytes(llama(), 1.0)


def kept_bytes(module, budget):
    """What F keeps for B, but for the module's own tensors."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compile_stage(module, backend="eager", budget=budget)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(leaf(2, 8, 16))
    own = {each.untyped_storage().data_ptr() for each in [*module.parameters(), *module.buffers()]}
    return sum(size for place, size in kept.items() if place not in own)


# ---------------------------------------------------------------- what is held, what W does


def split_of(module, x, dy=None):
    y = module(x)
    return backward_input(y, torch.ones_like(y) if dy is None else dy, x)


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_w_adds_products_in_place_and_computes_nothing_else_but_sums():
    """The norms' gradients were computed in B."""
    stage = llama()
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    compile_stage(stage, backend="eager")
    _, weight_grads = split_of(stage, leaf(2, 8, 16))
    with Operations() as operations:
        weight_grads.accumulate()
    assert operations.names - {"view", "permute", "_unsafe_view", "alias"} == {"addmm_", "add", "copy_"}


# ---------------------------------------------------------------- parameters


def both_sides(change=lambda module: None):
    """A Llama's stage, and a compiled one with the same weights."""
    sides = [llama()]
    sides.append(copy.deepcopy(sides[0]))
    for side in sides:
        change(side)
    compile_stage(sides[1], backend="eager")
    return sides


def test_hooks_of_parameters_fire_once_and_may_change_gradients():
    fired = CountCalls()

    def change(module):
        module.layer_1.mlp.up.weight.register_hook(lambda grad: grad * 2)
        module.layer_1.mlp_norm.weight.register_hook(lambda grad: -grad)
        module.layer_1.mlp.down.weight.register_post_accumulate_grad_hook(fired)
        module.layer_1.mlp.gate.weight.register_post_accumulate_grad_hook(fired)

    x = leaf(2, 8, 16)
    eager, compiled = both_sides(change)
    for side in (eager, compiled):
        for _ in range(2):
            split_of(side, x)[1].accumulate()
    assert fired.number == 2 * 2 * 2
    assert_close(grads_of(compiled), grads_of(eager), 1e-5)


# ---------------------------------------------------------------- how often it compiles


@pytest.fixture
def made(monkeypatch):
    """Counts calls that are traced, and graphs that are compiled."""
    traced, compiled = CountCalls(), CountCalls()
    capture, build_split = compiled_forward.capture, compiled_forward.build_split
    monkeypatch.setattr(compiled_forward, "capture", lambda *args: (traced(), capture(*args))[1])
    monkeypatch.setattr(compiled_forward, "build_split", lambda *args: (compiled(), build_split(*args))[1])
    return lambda: (traced.number, compiled.number)


def test_a_stage_is_compiled_once_for_all_microbatches_and_again_for_another_shape(made):
    stage = llama()
    compile_stage(stage, backend="eager")
    for _ in range(3):
        stage(leaf(2, 8, 16))
    assert made() == (1, 1)
    stage(leaf(1, 8, 16))
    assert made() == (2, 2)
    stage.layer_1.eval()
    stage(leaf(1, 8, 16))
    assert made() == (2, 2)  # the same code: a Llama has no dropout
    with torch.no_grad():
        stage(leaf(3, 8, 16))
    assert made() == (2, 2)


def test_layers_that_repeat_are_compiled_once(made):
    cache = {}
    for stage in (llama(num_layers=6), llama(num_layers=6)):
        compile_stage(stage, backend="eager", whole=False, cache=cache)
        stage(leaf(2, 8, 16))
    assert made() == (1, 1)


class Numbered(nn.Module):
    """A layer that knows its number, and doesn't use it."""

    def __init__(self, number, factor=1.0):
        super().__init__()
        self.number, self.factor = number, factor
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x))) * self.factor


# ---------------------------------------------------------------- retreats


class Choosing(Numbered):
    """Control flow that depends on data."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x - 1


class Hooked(Numbered):
    def __init__(self):
        super().__init__(0)
        self.first.register_forward_hook(lambda module, args, output: output * 2)


class Alone(torch.autograd.Function):
    calls = CountCalls()

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Alone.calls()
        return grad * 2


class Custom(Numbered):
    def forward(self, x):
        return Alone.apply(super().forward(x))


REASONS = {
    Choosing: "[Dd]ata-dependent",
    Hooked: "hooks on first",
    Custom: "autograd.Function|side effect",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_layer_that_cannot_be_compiled_stays_eager_by_name_and_reason(kind, retreats):
    def make():
        other = kind(0) if issubclass(kind, Numbered) and kind is not Hooked else kind()
        return nn.Sequential(Numbered(0), other, Numbered(2))

    equals_plain(make, lambda: leaf(2, 4))
    whole, layer = retreats()
    assert whole.startswith("stage is not compiled, its layers are, each by itself: ")
    assert layer.startswith("stage 1 is not compiled, it stays eager: ")
    assert re.search(REASONS[kind], layer)


def test_explain_says_where_a_compiled_gradient_is_computed_and_why(retreats):
    stage, x = nn.Sequential(Numbered(0), Choosing(1)), leaf(2, 4)
    compile_stage(stage, backend="eager")
    y = stage(x)
    explanation = explain(y, x, stage.named_parameters())
    rows = {row.name: row for row in explanation.rows}
    assert (rows["0.first.weight"].where, rows["0.first.bias"].where) == ("W", "W")  # dy is held anyway
    assert rows["0.first.weight"].why == "compiled: its product is in W's graph"
    assert "not compiled" not in rows["0.first.weight"].why
    assert re.search("; not compiled: .*[Dd]ata-dependent", rows["1.first.weight"].why)
    assert len(explanation.rows) == len(list(stage.parameters()))


@pytest.mark.parametrize("part", ["_dynamo", "_functorch", "_inductor"])
def test_each_part_of_torchs_compiler_is_used_in_one_file(part):
    files = list(Path(zbpp.__file__).parent.rglob("*.py"))
    assert [path.stem for path in files if f"torch.{part}" in path.read_text()] == [
        {"_functorch": "aot_autograd"}.get(part, part.lstrip("_"))
    ]


def test_a_task_says_all_parameters_that_it_adds_to_also_where_one_has_a_hook():
    """Whoever drops the task, or moves gradients for it, knows what else it serves."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compile_stage(module, backend="eager")
    module[0].weight.register_hook(lambda gradient: None)
    x = torch.randn(2, 4, requires_grad=True)
    _, weight_grads = backward_input(module(x), torch.ones(2, 4), x)
    (task,) = weight_grads.tasks
    assert {*map(id, leaves_of(task))} == {*map(id, module.parameters())}
    weight_grads.accumulate()
    assert all(each.grad is not None for each in module.parameters())
