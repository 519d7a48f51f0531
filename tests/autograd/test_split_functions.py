"""Custom autograd Functions in the split backward, `defer`, and rules for new nodes."""

import pytest
import torch
from torch import nn

from helpers.split import assert_close, assert_equals_plain, double, float64, grads_of, leaf
from zbpp.autograd import backward_input, defer, keep, node_roles, rule, rules, saved

RUNS: list[str] = []


@pytest.fixture(autouse=True)
def _no_runs():
    RUNS.clear()


class Eager(torch.autograd.Function):
    """x @ w.T with an ordinary backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        RUNS.append("backward")
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


class Deferring(Eager):
    """The same, whose weight gradient can wait."""

    @staticmethod
    def backward(ctx, dy):
        RUNS.append("backward")
        x, weight = ctx.saved_tensors
        return dy @ weight, defer(ctx, weight, product, dy, x)


def product(dy, x):
    RUNS.append("compute")
    assert not torch.is_grad_enabled()
    return dy.t() @ x


class Layer(nn.Module):
    def __init__(self, function, change=lambda weight: weight):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function, self.change = function, change

    def forward(self, x):
        return self.function.apply(x, self.change(self.weight))


def test_a_functions_backward_runs_once():
    facts = assert_equals_plain(
        lambda: nn.Sequential(nn.Linear(4, 4), Layer(Eager), nn.Linear(4, 4)), lambda: leaf(5, 4)
    )
    assert "1.weight" in facts.computed
    assert len(facts.deferred) == 4
    assert RUNS == 4 * ["backward"]  # two microbatches, plain and split


def test_defer_hands_work_to_w():
    facts = assert_equals_plain(
        lambda: nn.Sequential(nn.Linear(4, 4), Layer(Deferring)), lambda: leaf(5, 4), num_microbatches=1
    )
    assert "1.weight" in facts.deferred
    # In a plain backward at once, under the split in W.
    assert RUNS == ["backward", "compute", "backward", "compute"]


def test_what_is_deferred_runs_in_w_not_in_b():
    layer = Layer(Deferring)
    x = torch.randn(5, 4, requires_grad=True)
    _, weight_grads = backward_input(layer(x), torch.ones(5, 4), x)
    assert RUNS == ["backward"]
    assert layer.weight.grad is None
    assert weight_grads.held_bytes == 4 * (5 * 4 + 5 * 4)
    weight_grads.accumulate()
    assert RUNS == ["backward", "compute"]
    torch.testing.assert_close(layer.weight.grad, torch.ones(5, 4).t() @ x.detach())


def test_defer_in_a_stage_without_input_gradients():
    """Stage 0: nothing but the weight needs the Function to run."""
    facts = assert_equals_plain(lambda: Layer(Deferring), lambda: torch.randn(5, 4))
    assert facts.deferred == {"weight"}


def test_defer_on_a_weight_that_is_no_leaf_computes_at_once():
    facts = assert_equals_plain(lambda: Layer(Deferring, change=lambda w: w * 2), lambda: leaf(5, 4))
    assert facts.computed == {"weight"}


def test_defer_on_a_frozen_weight_computes_nothing_for_w():
    def make_module():
        layer = Layer(Deferring)
        layer.weight.requires_grad_(False)
        return layer

    assert assert_equals_plain(make_module, lambda: leaf(5, 4)).deferred == set()


def test_a_weight_deferred_by_a_function_and_used_by_a_layer_too():
    """Each part is added once: the layer's by W or B, the Function's by W."""

    class Both(Layer):
        def forward(self, x):
            return nn.functional.linear(torch.tanh(super().forward(x)), self.weight)

    assert_equals_plain(lambda: Both(Deferring), lambda: leaf(5, 4))


def test_a_weight_deferred_twice_by_functions():
    class Twice(Layer):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)))

    assert assert_equals_plain(lambda: Twice(Deferring), lambda: leaf(5, 4)).deferred == {"weight"}


def test_defer_obeys_the_chosen_parameters():
    module = nn.Sequential(Layer(Deferring), nn.Linear(4, 4))
    _, weight_grads = backward_input(
        module(torch.randn(5, 4)), torch.ones(5, 4), (), parameters=[module[1].weight]
    )
    weight_grads.accumulate()
    assert grads_of(module).keys() == {"1.weight"}


def test_defer_for_a_weight_that_is_an_input():
    """Then its gradient is asked for in B."""
    layer = Layer(Deferring)
    x = torch.randn(5, 4)
    (grad,), weight_grads = backward_input(layer(x), torch.ones(5, 4), layer.weight)
    weight_grads.accumulate()
    torch.testing.assert_close(grad, torch.ones(5, 4).t() @ x)
    assert layer.weight.grad is None


def test_defer_holds_no_graph():
    """Tensors that carry history are detached."""

    class Saves(Eager):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            assert x.grad_fn is not None
            return dy @ weight, defer(ctx, weight, lambda dy, x: RUNS.append(x.grad_fn) or dy.t() @ x, dy, x)

    assert_equals_plain(lambda: nn.Sequential(nn.Linear(4, 4), Layer(Saves)), lambda: leaf(5, 4))
    assert set(RUNS) == {None}


def test_a_function_with_several_outputs_and_unused_ones():
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t(), x * 2

        @staticmethod
        def backward(ctx, dy, dx):
            RUNS.append("backward")
            x, weight = ctx.saved_tensors
            return dy @ weight + 2 * dx, dy.t() @ x

    class First(Layer):
        def forward(self, x):
            return super().forward(x)[0]

    facts = assert_equals_plain(lambda: First(Pair), lambda: leaf(5, 4))
    assert facts.computed == {"weight"}
    assert len(RUNS) == 4


def test_a_function_of_the_weight_alone_is_a_chain_that_b_never_runs():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight * 3

        @staticmethod
        def backward(ctx, grad):
            RUNS.append("chain")
            return grad * 3

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return nn.functional.linear(x, Scale.apply(self.weight))

    assert assert_equals_plain(Scaled, lambda: leaf(5, 4)).deferred == {"weight"}
    RUNS.clear()
    with float64():
        module = Scaled()
        _, weight_grads = backward_input(module(double(5, 4)), double(5, 4), ())
    assert RUNS == []
    weight_grads.accumulate()
    assert RUNS == ["chain"]


# ---------------------------------------------------------------- a rule for a new node


@pytest.fixture
def _restored_rules():
    """Forget the rules that a test registers, also in the walk's cache of roles."""
    before = dict(rules._RULES)
    node_roles.role_of_type.clear()
    yield
    rules._RULES.clear()
    rules._RULES.update(before)
    node_roles.role_of_type.clear()


class Scale(nn.Module):
    """y = x * w, which autograd computes by a MulBackward0: no rule of zbpp's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


def add_row_sum(target, held, dy, fresh):
    gradient = (dy * held[0]).sum_to_size(target.shape)
    target.copy_(gradient) if fresh else target.add_(gradient)


@pytest.mark.usefixtures("_restored_rules")
def test_a_new_node_is_one_rule():
    assert assert_equals_plain(Scale, lambda: leaf(5, 4)).computed == {"weight"}

    @rule("MulBackward0", weights=(1,))
    def mul(node, operand):
        return keep(saved(node, "self"), add_row_sum)

    node_roles.role_of_type.clear()
    assert assert_equals_plain(Scale, lambda: leaf(5, 4)).deferred == {"weight"}


@pytest.mark.usefixtures("_restored_rules")
def test_a_rule_may_decline():
    """None leaves the operand to B."""

    @rule("MulBackward0", weights=(1,))
    def mul(node, operand):
        return None

    assert assert_equals_plain(Scale, lambda: leaf(5, 4)).computed == {"weight"}


def test_plain_backward_of_a_function_that_defers_is_plain():
    layer = Layer(Deferring).double()
    x, dy = double(5, 4), double(5, 4, seed=1)
    layer(x).backward(dy)
    assert_close(grads_of(layer), {"weight": dy.t() @ x})
    (grad,) = torch.autograd.grad(layer(x), layer.weight, dy)
    torch.testing.assert_close(grad, dy.t() @ x)
