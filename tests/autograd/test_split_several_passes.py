"""Several backward passes through one graph, against plain autograd with retain_graph=True."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpp
from helpers.cases import checkpoint as checkpoints
from helpers.cases import functions, graphs, models, saved_hooks
from helpers.split import (
    CountCalls,
    Waits,
    assert_close,
    buffers_of,
    double,
    draw_grads,
    float64,
    grads_of,
    leaf,
    tensors_of,
)
from helpers.watch import MODULES, Squashed, Watch
from zbpp import backward_input, checkpoint
from zbpp.autograd.compiled import compile_stage
from zbpp.benchmark.interleaved_timing import without_garbage_collection

ORDERS = {
    "each W at once": (0, "W0", 1, "W1"),
    "W late": (0, 1, "W0", "W1"),
    "W in reverse": (0, 1, "W1", "W0"),
    "three passes": (0, 1, "W1", 2, "W0", "W2"),
}


class Pair(nn.Module):
    """Two products with computed weights: W runs tanh of each by autograd. One weight is shared."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        shared = torch.tanh(self.first.weight)
        x = F.linear(x, shared, self.first.bias)
        return F.linear(torch.tanh(x), shared * torch.exp(self.second.weight)), x


CASES = {
    "layers": graphs.partly_frozen,
    "several outputs": lambda: graphs.forward("a site that feeds another"),
    "several losses": lambda: graphs.forward("losses"),
    "stage 0": graphs.embedding_then_layers,
    "in place": graphs.input_without_grad,
    "encoder layer": models.encoder_layer,
    "LSTM": models.recurrent_network,
    "resnet": models.resnet,
    "llama": models.hf_llama,
    "gpt2, tied": models.hf_gpt2,
    "Function": functions.function_between_layers,
    "Function that defers": functions.deferring_function_above_layer,
    "Function that defers twice": functions.weight_of_function_used_twice,
    "Function of the weight alone": functions.function_of_the_weight_alone,
    "save_on_cpu": saved_hooks.sites_under_save_on_cpu,
    "checkpoint": lambda: checkpoints.checkpointed_blocks(p=0.3),
    "nested checkpoints": checkpoints.nested_checkpoints,
    "torch's checkpoint": lambda: checkpoints.checkpointed_blocks(checkpoints.torchs, p=0.3),
    "reentrant checkpoint": lambda: checkpoints.checkpointed_blocks(checkpoints.reentrant, p=0.3),
    "computed weights": lambda: graphs.Case(Pair, lambda: leaf(5, 4)),
}


def forward(case, module=None):
    """The module, its inputs and outputs; equal at each call."""
    with float64():
        torch.manual_seed(0)
        module = module or case.make_module()
        torch.manual_seed(100)
        inputs = case.make_inputs()
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        torch.manual_seed(200)
        return module, inputs, tensors_of(case.call(module, *inputs))


def flowing(outputs, number):
    """Of pass `number`: the outputs with grad and their gradients. Pass 1 begins at the last output only."""
    grads = draw_grads(outputs, number)
    pairs = [(each, grad) for each, grad in zip(outputs, grads, strict=True) if grad is not None]
    return zip(*(pairs[-1:] if number == 1 else pairs), strict=True)


def passes(case, order):
    """Run B's and W's in this order. Returns the gradients of parameters, and of inputs per pass."""
    module, inputs, outputs = forward(case)
    buffers, input_grads, later = buffers_of(module), {}, {}
    last = max(each for each in order if isinstance(each, int))
    for each in order:
        if isinstance(each, str):
            later[int(each[1:])].accumulate()
            continue
        roots, grads = flowing(outputs, each)
        found, later[each] = backward_input(roots, grads, inputs, keep=each < last)
        input_grads |= {
            f"pass {each}, input {n}": grad.clone() for n, grad in enumerate(found) if grad is not None
        }
    assert_close(buffers_of(module), buffers, tolerance=0)
    return grads_of(module), input_grads


def plain(case, num_passes):
    module, inputs, outputs = forward(case)
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    for each in wanted:
        each.retain_grad()
    input_grads = {}
    for number in range(num_passes):
        torch.autograd.backward(*flowing(outputs, number), retain_graph=True)
        for n, each in enumerate(inputs):
            if isinstance(each, torch.Tensor) and each.grad is not None:
                input_grads[f"pass {number}, input {n}"], each.grad = each.grad, None
    return grads_of(module), input_grads


@pytest.mark.parametrize("name", CASES)
def test_the_passes_add_up_to_plain_autograds_in_any_order_of_w(name):
    case = CASES[name]()
    expected = {num: plain(case, num) for num in (2, 3)}
    for order in ORDERS.values():
        found = passes(case, order)
        for side, reference in zip(found, expected[len(order) // 2], strict=True):
            assert_close(side, reference, case.tolerance)


def test_a_pass_before_the_last_leaves_a_plain_backward_possible():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), double(5, 4)
    y = module(x)
    _, later = backward_input(y, double(5, 4, seed=1), (), keep=True)
    y.backward(double(5, 4, seed=2))
    later.accumulate()
    found = grads_of(module)
    module.zero_grad()
    module(x).backward(double(5, 4, seed=1) + double(5, 4, seed=2))
    assert_close(found, grads_of(module))


# ---------------------------------------------------------------- what is refused


def test_after_the_last_pass_another_is_refused_and_told_of_keep():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(5, 4)
    y = layer(x)
    for keep in (True, True, False):
        backward_input(y, torch.ones_like(y), x, keep=keep)
    with pytest.raises(RuntimeError, match=r"backward_input\(\.\.\., keep=True\) in every pass but the last"):
        backward_input(y, torch.ones_like(y), x)


@pytest.mark.parametrize("late", [False, True], ids=["before the second B", "after it"])
def test_an_input_that_changed_between_passes_is_refused(late):
    """x belongs to the graph and to the W's of both passes."""
    layer, x = nn.Linear(4, 4), torch.randn(5, 4)
    y = layer(x)
    _, first = backward_input(y, torch.ones_like(y), (), keep=True)
    second = backward_input(y, torch.ones_like(y), ())[1] if late else None
    x.add_(1)
    if second is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward_input(y, torch.ones_like(y), ())
    for each in (first, second):
        if each is not None:
            with pytest.raises(zbpp.autograd.weight_grads.ChangedInPlace):
                each.accumulate()


def test_the_dy_of_each_pass_is_guarded_by_itself():
    layer, x = nn.Linear(4, 4).double(), double(5, 4)
    y, dys = layer(x), [double(5, 4, seed=1), double(5, 4, seed=2)]
    first, second = (backward_input(y, dy, (), keep=True)[1] for dy in dys)
    dys[0].mul_(2)
    second.accumulate()
    torch.testing.assert_close(layer.weight.grad, dys[1].t() @ x)
    with pytest.raises(zbpp.autograd.weight_grads.ChangedInPlace):
        first.accumulate()


def test_a_computed_weight_that_a_plain_backward_has_freed_is_refused():
    """W goes through tanh once more."""
    layer, x = Squashed(4, 4).double(), double(5, 4)
    y = layer(x)
    _, later = backward_input(y, double(5, 4), (), keep=True)
    y.backward(double(5, 4))
    with pytest.raises(RuntimeError, match=r"W of a weight of shape \(4, 4\).*run W before that backward"):
        later.accumulate()


def test_a_tensor_that_a_checkpoint_closes_over_serves_several_passes():
    with float64():
        block, x = checkpoints.Block(), leaf(5, 8)
    outer = torch.tanh(x) * 2
    y = checkpoint(lambda x: block(x) * outer, x)
    expected = torch.autograd.grad(block(x) * (torch.tanh(x) * 2), [x, *block.parameters()], 2 * double(5, 8))
    grads = []
    for keep in (True, False):
        (grad,), later = backward_input(y, double(5, 8), x, keep=keep)
        later.accumulate()
        grads.append(grad)
    for found, each in zip([sum(grads), *(p.grad for p in block.parameters())], expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- hooks and Functions


def test_hooks_fire_once_per_pass():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), Squashed(4, 4)

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            hidden.register_hook(fired["tensor"])
            hidden.grad_fn.register_hook(fired["node"])
            return self.second(hidden)

    fired = {name: CountCalls() for name in ("tensor", "node", "leaf", "computed leaf", "accumulated")}
    module, x = Watched(), leaf(5, 4)
    module.first.weight.register_hook(fired["leaf"])
    module.second.weight.register_hook(fired["computed leaf"])
    module.first.bias.register_post_accumulate_grad_hook(fired["accumulated"])
    y = module(x)
    for number, keep in enumerate((True, True, False)):
        backward_input(y, torch.ones_like(y), x, keep=keep)[1].accumulate()
        assert {each.number for each in fired.values()} == {number + 1}, fired


@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_stage_serves_several_passes(order):
    """Cut as for Inductor, run as it is; dropout and running statistics included."""

    def make():
        layers = (
            nn.Linear(8, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(16, 8),
        )
        return nn.Sequential(*layers)

    def make_compiled():
        module = make()
        compile_stage(module, backend="eager")
        return module

    eager, compiled = (graphs.Case(each, lambda: leaf(6, 8)) for each in (make, make_compiled))
    expected = plain(eager, len(ORDERS[order]) // 2)
    for found, reference in zip(passes(compiled, ORDERS[order]), expected, strict=True):
        assert_close(found, reference)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", MODULES)
def test_after_the_last_pass_only_what_w_needs_is_alive(name):
    module = MODULES[name]()
    with without_garbage_collection(), Watch() as watch:
        x = torch.randn(2, 5, 16, requires_grad=True)
        output = module(x)
        later = []
        for keep in (True, True, False):
            (dy,) = draw_grads([output], len(later))
            later.append(backward_input(output, dy, x, keep=keep)[1])
        del output, x, dy
        kept = {
            tensor.untyped_storage()._cdata
            for weight_grads in later
            for tensor in weight_grads.tensors()
        }  # fmt: skip
        assert {key: what for key, what in watch.alive().items() if key not in kept} == {}
        for weight_grads in reversed(later):
            weight_grads.accumulate()
        gradients = {parameter.grad.untyped_storage()._cdata for parameter in module.parameters()}
        assert {key: what for key, what in watch.alive().items() if key not in gradients} == {}


@pytest.mark.parametrize("name", MODULES)
def test_an_abandoned_graph_dies_with_its_outputs(name):
    """W of the pass that was run is still possible, and holds x and dy alone."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.stored = x.exp()
            stored.append(weakref.ref(ctx.stored))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    stored = []
    module = MODULES[name]()
    with without_garbage_collection(), Watch() as watch:
        output = Keeps.apply(module(torch.randn(2, 5, 16)))
        (dy,) = draw_grads([output])
        _, later = backward_input(output, dy, (), keep=True)
        assert stored[0]() is not None
        del output, dy
        assert stored[0]() is None
        kept = {tensor.untyped_storage()._cdata for tensor in later.tensors()}
        assert {key: what for key, what in watch.alive().items() if key not in kept} == {}
        later.accumulate()


# ---------------------------------------------------------------- gradient penalties


def penalty(y, x):
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


class Critic(nn.Module):
    """Linear layers, an embedding, a tied weight, a Function that defers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale, self.norm = nn.Parameter(torch.randn(4)), nn.LayerNorm(4)

    def forward(self, x):
        x = x + self.embedding(torch.arange(5))
        x = self.down(torch.tanh(self.up(Waits.apply(x, self.scale))))
        return F.linear(torch.tanh(self.norm(x)), self.up.weight)


CRITICS = {
    "linear": (Critic, (5, 4)),
    "computed weight": (lambda: nn.Sequential(Squashed(4, 6), nn.Softplus(), Squashed(6, 2)), (5, 4)),
    "attention": (lambda: MODULES["blocks"](), (2, 5, 16)),
}


@pytest.mark.parametrize("name", CRITICS)
def test_a_gradient_penalty_inside_forward_is_part_of_the_graph(name):
    make, shape = CRITICS[name]
    sides = []
    for split in (False, True):
        with float64():
            torch.manual_seed(0)
            module = make()
        x = double(*shape).requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = module(x)
            loss = y.square().mean() + 10 * penalty(y, x)
        if split:
            (grad,), later = backward_input(loss, None, x)
            assert grads_of(module) == {}
            later.accumulate()
        else:
            loss.backward()
            grad = x.grad
        sides.append(grads_of(module) | {"x": grad})
    assert_close(sides[1], sides[0])


def test_the_weight_gradient_of_a_function_that_defers_can_be_differentiated_again():
    x, weight = double(5, 4).requires_grad_(), double(4, seed=1).requires_grad_()
    y = torch.tanh(Waits.apply(x, weight)).sum()
    plain = torch.tanh(x * weight).sum()
    second = [
        torch.autograd.grad(
            torch.autograd.grad(each, weight, create_graph=True)[0].square().sum(), (x, weight)
        )
        for each in (y, plain)
    ]
    for found, expected in zip(*second, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["zbpp.checkpoint", "compiled stage"])
def test_a_penalty_through_what_has_no_second_derivative_is_refused(kind):
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(5, 4)
    if kind == "compiled stage":
        compile_stage(module, backend="eager")
        y = module(x)
    else:
        y = checkpoint(module, x)
    with pytest.raises(RuntimeError, match=f"create_graph=True goes through (a )?{kind}"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grads_of(module) == {}
