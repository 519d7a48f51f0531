"""The split backward where tensors are shared: tied weights, aliased gradients, gradients that exist."""

import pytest
import torch
from torch import nn

from helpers.split import (
    assert_close,
    assert_equals_plain,
    double,
    float64,
    grads_of,
    leaf,
    output_grads,
)
from zbpp import backward_input

# ---------------------------------------------------------------- tied weights


class Tied(nn.Module):
    """Two layers with one weight, and what lies between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.middle(self.first(x))))


def test_a_weight_tied_between_two_layers_waits_for_both():
    facts = assert_equals_plain(lambda: Tied(torch.tanh), lambda: leaf(5, 4))
    assert {"first.weight", "middle.weight"} <= facts.deferred
    assert facts.computed == set()


def test_a_weight_used_twice_in_one_expression_waits():
    class Both(nn.Linear):
        def forward(self, x):
            return super().forward(x) * super().forward(x.flip(0))

    assert assert_equals_plain(lambda: Both(4, 4), lambda: leaf(5, 4)).deferred == {"weight", "bias"}


def test_a_layer_applied_many_times_waits_for_all():
    class Loop(nn.Linear):
        def forward(self, x):
            for _ in range(5):
                x = torch.tanh(super().forward(x))
            return x

    assert assert_equals_plain(lambda: Loop(4, 4), lambda: leaf(5, 4)).deferred == {"weight", "bias"}


def test_a_tied_embedding_and_head_are_deferred_together():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(11, 4, padding_idx=2), nn.Linear(4, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.layer(self.embedding(tokens))))

    facts = assert_equals_plain(Language, lambda: torch.randint(11, (2, 5)))
    assert facts.deferred == {"embedding.weight", "layer.weight", "layer.bias"}


EAGER_USES = {
    "a penalty": lambda x, w: (x @ w, (w**2).sum()),
    "an element-wise use": lambda x, w: x @ w * w[0],
    "a use through a tree": lambda x, w: x @ w + x @ (w / w.norm()),
    "a shared view": lambda x, w: (lambda t: x @ t + t.sum())(w.t()),
    "a shared computation": lambda x, w: (lambda h: x @ h + h.sum())(w * 2),
    "itself as output": lambda x, w: (x @ w, w * 1),
    "a bias of another layer": lambda x, w: torch.addmm(w, x, w),
}


@pytest.mark.parametrize("name", EAGER_USES)
def test_a_weight_with_one_eager_use_is_computed_in_b_as_a_whole(name):
    """A gradient captured at a leaf collects every path: deferring one would count it twice."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return EAGER_USES[name](x, self.weight)

    facts = assert_equals_plain(Module, lambda: leaf(4, 4))
    if name != "a bias of another layer":
        assert facts.computed == {"weight"}


def test_a_weight_that_is_an_input_of_b_too_gets_its_gradient_there():
    """A leaf in `inputs` is never a weight."""
    module = nn.Linear(4, 4, dtype=torch.float64)
    x, dy = double(5, 4), double(5, 4, seed=1)
    (expected,) = torch.autograd.grad(module(x), module.weight, dy)
    (found,), weight_grads = backward_input(module(x), dy, module.weight)
    weight_grads.accumulate()
    assert torch.equal(found, expected)
    assert module.weight.grad is None
    assert module.bias.grad is not None


# ---------------------------------------------------------------- gradients that alias each other


class WithSum(nn.Module):
    """The gradient of p IS dy of the linear layer IS the gradient that arrived."""

    def __init__(self):
        super().__init__()
        self.linear, self.p = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return self.linear(x) + self.p


def test_a_gradient_that_is_also_dy_is_copied():
    assert_equals_plain(WithSum, lambda: leaf(5, 4), num_microbatches=3)


def test_what_arrived_is_not_written_to_and_may_be_written_to_after_w():
    with float64():
        torch.manual_seed(0)
        module = WithSum()
    for microbatch in range(2):
        dy = double(5, 4, seed=microbatch)
        before = dy.clone()
        _, weight_grads = backward_input(module(double(5, 4)), dy, ())
        weight_grads.accumulate()
        assert torch.equal(dy, before)
        after = grads_of(module)
        dy.zero_()  # the buffer is used again
        assert all(torch.equal(grad, after[name]) for name, grad in grads_of(module).items())


def test_two_parameters_with_one_gradient_do_not_share_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x + (self.a + self.b)

    assert_equals_plain(Two, lambda: leaf(5, 4), num_microbatches=3)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.sum(),
        lambda p: p.mean(0),
        lambda p: p.expand(3, 5, 4),
        lambda p: p[:, None].expand(5, 3, 4),
    ],
)
def test_a_gradient_without_memory_of_its_own_is_copied(use):
    """`p.sum()` gives one of stride 0."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.randn(5, 4))

        def forward(self, x):
            return x.sum() + use(self.p)

    facts = assert_equals_plain(Module, lambda: leaf(5, 4), num_microbatches=3)
    assert facts.grads["p"].stride() == (4, 1)


def test_an_input_gradient_changed_by_its_owner_does_not_disturb_w():
    """g leaves for the previous stage; on the first linear layer of a chain it may alias nothing of W's."""
    with float64():
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
    expected = nn.Linear(4, 4, dtype=torch.float64)
    expected.load_state_dict(module.state_dict())
    x, dy = double(5, 4).requires_grad_(), double(5, 4, seed=1)
    expected(x).backward(dy)
    (grad,), weight_grads = backward_input(module(x), dy, x)
    grad.zero_()
    weight_grads.accumulate()
    assert_close(grads_of(module), grads_of(expected))


# ---------------------------------------------------------------- gradients that exist already


LAYOUTS = {
    "contiguous": lambda grad: grad.clone(),
    "transposed": lambda grad: grad.t().contiguous().t(),
    "with gaps": lambda grad: torch.zeros(8, 8)[::2, ::2].copy_(grad),
}


class Mixed(nn.Module):
    """A deferred weight, one behind a view, one computed in B."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.linear(x) @ self.weight * self.scale


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_added_to_those_that_exist_whatever_their_strides(layout):
    def make_module():
        module = Mixed()
        for parameter in module.parameters():
            parameter.grad = LAYOUTS[layout](torch.randn(4, 4))
        return module

    facts = assert_equals_plain(make_module, lambda: leaf(4, 4))
    assert facts.deferred == {"linear.weight", "weight"}


def test_gradients_are_added_in_place():
    """Data parallelism looks at the same memory."""
    with float64():
        torch.manual_seed(0)
        module = Mixed()
    buffers = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.grad = buffers[name]
    _, weight_grads = backward_input(module(double(4, 4)), double(4, 4), ())
    weight_grads.accumulate()
    for name, parameter in module.named_parameters():
        assert parameter.grad is buffers[name]
        assert buffers[name].abs().max() > 0


def test_the_first_gradient_takes_the_parameters_layout():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6).t())
            self.scale = nn.Parameter(torch.randn(4, 5).t())

        def forward(self, x):
            return (x @ self.weight) * self.scale

    facts = assert_equals_plain(Transposed, lambda: leaf(5, 6))
    assert facts.grads["weight"].stride() == (1, 6)
    assert facts.grads["scale"].stride() == (1, 5)


def test_w_may_come_in_any_order():
    with float64():
        torch.manual_seed(0)
        module, expected = Mixed(), Mixed()
    expected.load_state_dict(module.state_dict())
    later = []
    for microbatch in range(3):
        x = double(4, 4, seed=microbatch)
        output = module(x)
        grads = output_grads(output, microbatch)
        expected(x).backward(grads)
        later.append(backward_input(output, grads, ())[1])
    for microbatch in (1, 0, 2):
        later[microbatch].accumulate()
    assert_close(grads_of(module), grads_of(expected))
