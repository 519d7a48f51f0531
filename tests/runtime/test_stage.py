"""StageWorker against plain autograd: one stage, in whatever order it is asked."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.tensors import drawn
from zbpp.planning import plan
from zbpp.runtime import BoundaryError, Pipeline, StageWorker
from zbpp.runtime.call.feed import Feed, LossGradients

M, ROWS, SIZE = 3, 4, 5


def layers():
    """Two linear layers in float64, always with the same weights."""
    module = nn.Sequential(nn.Linear(SIZE, 7), nn.Tanh(), nn.Linear(7, SIZE)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed))
    return module


def middle(module, num_microbatches=M):
    """A worker whose inputs come from another stage, ready for a step."""
    worker = StageWorker(1, module, is_last=False)
    worker.begin(feed(num_microbatches))
    return worker


def feed(num_microbatches=M, args=(), targets=None):
    return Feed(
        args,
        [{}] * num_microbatches,
        targets,
        list(range(num_microbatches)),
        LossGradients(1 / num_microbatches),
    )


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def inputs_and_output_gradients():
    return [
        (drawn(ROWS, SIZE, seed=10 + i).requires_grad_(), drawn(ROWS, SIZE, seed=20 + i)) for i in range(M)
    ]


def plain(module):
    """What loss.backward() makes of the same microbatches: input gradients, weight gradients."""
    of_inputs = []
    for x, g in inputs_and_output_gradients():
        module(x).backward(g)
        of_inputs.append(x.grad)
    return of_inputs, gradients(module)


# Every order that keeps F before B before W and each ascending.
ORDERS = ["F0 B0 W0 F1 B1 W1 F2 B2 W2", "F0 F1 F2 B0 B1 B2 W0 W1 W2", "F0 F1 B0 F2 B1 W0 W1 B2 W2"]
WHOLE = "F0 BW0 F1 F2 BW1 BW2"


def run(worker, order):
    """Input gradients per microbatch, from doing `order`."""
    of_inputs = {}
    data = inputs_and_output_gradients()
    for word in order.split():
        op, microbatch = word[:-1], int(word[-1])
        x, g = data[microbatch]
        if op == "F":
            worker.forward(microbatch, (x,))
        elif op == "W":
            assert worker.backward_weight(microbatch) == ()
        else:
            work = worker.backward_input if op == "B" else worker.backward
            (of_inputs[microbatch],) = work(microbatch, (g,))
    worker.end()
    return [of_inputs[i] for i in range(M)]


@pytest.mark.parametrize("order", [*ORDERS, WHOLE])
def test_gradients_are_those_of_plain_autograd(order):
    module = layers()
    found = run(middle(module), order)
    expected, expected_weights = plain(layers())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert gradients(module).keys() == expected_weights.keys()
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, expected_weights[name], rtol=1e-12, atol=1e-14)


def test_every_order_gives_the_same_bits():
    results = []
    for order in [*ORDERS, WHOLE]:
        module = layers()
        results.append((run(middle(module), order), gradients(module)))
    for of_inputs, weights in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_inputs, results[0][0], strict=True))
        assert all(torch.equal(weights[name], results[0][1][name]) for name in weights)


# ---------------------------------------------------------------- what is left over


@pytest.mark.parametrize(
    ("order", "left"),
    [("F0 F1 BW0", r"saved\(1,1\)"), ("F0 B0", r"deferred\(1,0\)"), ("F0 F1 B0", r"saved\(1,1\), deferred")],
)
def test_work_left_over_at_the_end_of_a_step_is_an_error_that_names_it(order, left):
    worker = middle(layers())
    data = inputs_and_output_gradients()
    for word in order.split():
        op, microbatch = word[:-1], int(word[-1])
        work = {"F": worker.forward, "B": worker.backward_input, "BW": worker.backward}[op]
        work(microbatch, (data[microbatch][0 if op == "F" else 1],))
    with pytest.raises(RuntimeError, match=f"a call ended with work left over: {left}"):
        worker.end()


# ---------------------------------------------------------------- unusual boundaries


class Branches(nn.Module):
    """(a, b) in, three out: one of both, one of b alone, one that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE).double(), nn.Linear(SIZE, SIZE).double()

    def forward(self, a, b):
        return self.first(a) + b, self.second(b), (b > 0).detach()


def test_several_outputs_each_take_their_gradient():
    module = Branches()
    expected = copy.deepcopy(module)
    a, b = drawn(ROWS, SIZE, seed=1).requires_grad_(), drawn(ROWS, SIZE, seed=2).requires_grad_()
    g0, g1 = drawn(ROWS, SIZE, seed=3), drawn(ROWS, SIZE, seed=4)
    worker = middle(module)
    outputs = worker.forward(0, (a, b))
    assert [output.requires_grad for output in outputs] == [True, True, False]
    of_a, of_b = worker.backward_input(0, (g0, g1, None))
    worker.backward_weight(0)
    torch.autograd.backward(expected(a, b)[:2], (g0, g1))
    torch.testing.assert_close(of_a, a.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(of_b, b.grad, rtol=1e-12, atol=0)
    for name, gradient in gradients(expected).items():
        torch.testing.assert_close(gradients(module)[name], gradient, rtol=1e-12, atol=1e-14)


def test_an_output_that_the_next_stage_ignored_has_no_gradient_and_gives_none():
    """g is None for the first output: `first` and a get no gradient, as in plain autograd."""
    module = Branches()
    a, b = drawn(ROWS, SIZE, seed=1).requires_grad_(), drawn(ROWS, SIZE, seed=2).requires_grad_()
    worker = middle(module)
    worker.forward(0, (a, b))
    of_a, of_b = worker.backward_input(0, (None, drawn(ROWS, SIZE, seed=4), None))
    worker.backward_weight(0)
    assert of_a is None
    assert of_b is not None
    assert gradients(module).keys() == {"second.weight", "second.bias"}


class Tripled(nn.Module):
    def forward(self, x):
        return x.mul_(3.0)


@pytest.mark.parametrize("name", ["zb_v", "interleaved_1f1b"])
def test_changing_what_the_stage_before_on_this_rank_has_saved_is_an_error(name):
    """tanh saves its output, which the next stage overwrites: plain autograd refuses that, too."""
    stages = {0: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()), 1: Tripled()}
    pipeline = Pipeline(stages, plan(name, 1, 2, stages_per_rank=2), nn.functional.mse_loss)
    x = torch.ones(4, SIZE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.Sequential(*stages.values())(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipeline.step(x, target=x)


# ---------------------------------------------------------------- the last stage


def last(module, loss_fn, targets, num_microbatches=M):
    worker = StageWorker(2, module, is_last=True, loss_fn=loss_fn)
    worker.begin(feed(num_microbatches, targets=targets))
    return worker


def test_the_last_stages_f_returns_the_gradient_of_the_mean_loss():
    module, targets = layers(), [drawn(ROWS, SIZE, seed=30 + i) for i in range(M)]
    worker = last(module, F.mse_loss, targets)
    expected, losses = layers(), []
    for microbatch, (x, _) in enumerate(inputs_and_output_gradients()):
        (start,) = worker.forward(microbatch, (x,))
        assert start.item() == 1 / M
        (found,) = worker.backward(microbatch, (start,))
        losses.append(F.mse_loss(expected(x), targets[microbatch]))
        (losses[-1] / M).backward()
        torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=0)
    assert [loss.item() for loss in worker.losses] == [loss.item() for loss in losses]
    assert not any(loss.requires_grad for loss in worker.losses)
    for name, gradient in gradients(expected).items():
        torch.testing.assert_close(gradients(module)[name], gradient, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- what doesn't fit


class FailsAt(nn.Module):
    """Raises in its n-th forward."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error = number, error

    def forward(self, x):
        if self.left == 0:
            raise self.error
        self.left -= 1
        return x


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


ZEROS, FROZEN = [drawn(ROWS, SIZE)] * M, layers().requires_grad_(False)
REFUSED = [
    (lambda: middle(Returns([1])), BoundaryError, "stage 1 returned int: a stage returns a tensor, or"),
    (lambda: middle(Returns(None)), BoundaryError, "returned NoneType"),
    (lambda: middle(Returns((torch.ones(1), 2.0))), BoundaryError, "returned Tensor, float"),
    (lambda: middle(Returns({"h": torch.ones(1)})), BoundaryError, r"return tuple\(output.values\(\)\)$"),
    (lambda: last(Returns(None), F.mse_loss, ZEROS), BoundaryError, "stage 2, the last one, returned nothi"),
    (
        lambda: last(layers(), F.mse_loss, None),
        ValueError,
        "the last stage needs target=..., which goes to loss.output, target.: write",
    ),
    (lambda: last(layers(), None, None), ValueError, r"must be a scalar tensor, not \(float64\[4, 5\]\)"),
    (lambda: last(layers(), lambda y, _: 0.0, ZEROS), ValueError, "must be a scalar tensor, not float"),
    (lambda: last(FROZEN, F.mse_loss, ZEROS), ValueError, "the loss does not require grad: nothing"),
    (lambda: middle(FailsAt(0, torch.OutOfMemoryError("full"))), torch.OutOfMemoryError, "^full$"),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make().forward(0, (drawn(ROWS, SIZE),))
