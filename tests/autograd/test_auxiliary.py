"""auxiliary_loss without a pipeline: who collects a value, and what checkpoints and compilers make of it."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from helpers.split import assert_close, double, float64, grads_of
from zbpp import auxiliary_loss, auxiliary_losses, backward_input, checkpoint
from zbpp.autograd.compiled import compile_stage

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


class Reporting(nn.Module):
    """Reports the mean square of its router's logits, and those of a branch that the output doesn't use."""

    def __init__(self, size=4):
        super().__init__()
        self.router, self.branch, self.linear = (nn.Linear(size, size) for _ in range(3))

    def compute(self, x):
        logits = self.router(x)
        z = logits.square().mean()
        return self.linear(x) * logits.sigmoid(), {"z": z + z.sin(), "side": self.branch(x).sum()}

    def forward(self, x):
        y, losses = self.compute(x)
        for name, value in losses.items():
            auxiliary_loss(name, value)
        return y


class Stack(nn.Module):
    """call(layer, x): how each layer is run."""

    def __init__(self, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layers, self.call = nn.ModuleList(Reporting() for _ in range(3)), call

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def stack(call=lambda layer, x: layer(x)):
    with float64():
        torch.manual_seed(0)
        return Stack(call)


def expected(g):
    """Output, sums and gradients with the losses passed by hand."""
    module, x, sums = stack(), double(5, 4), {"z": 0.0, "side": 0.0}
    for layer in module.layers:
        x, losses = layer.compute(x)
        sums = {name: sums[name] + losses[name] for name in sums}
    (sum(sums.values()) * 0.5 + (x * g).sum()).backward()
    return x.detach(), {name: value.item() for name, value in sums.items()}, grads_of(module)


# ---------------------------------------------------------------- blocks


def test_values_of_one_name_are_summed_in_the_innermost_block():
    with auxiliary_losses() as outer:
        auxiliary_loss("z", ONE)
        with auxiliary_losses() as inner:
            auxiliary_loss("z", TWO)
            auxiliary_loss("balance", TWO.reshape(1, 1))
        auxiliary_loss("z", TWO)
    assert outer == {"z": 3.0}
    assert inner == {"z": 2.0, "balance": 2.0}
    assert inner["balance"].shape == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("", ONE, "auxiliary_loss '': the name must be a string that is not empty"),
        (None, ONE, "auxiliary_loss None: the name must be a string"),
        ("z", 0.5, "'z' is a float, which no gradient can flow through: give one floating-point tensor"),
        ("z", torch.ones(2), r"'z' is a tensor of shape \(2,\): give .* such as value.mean\(\)"),
        ("z", torch.tensor(1), "'z' is a tensor of torch.int64"),
    ],
)
def test_what_is_no_named_scalar_is_refused(name, value, said):
    with pytest.raises(ValueError, match=said):
        auxiliary_loss(name, value)


def test_gradients_turned_off_inside_the_block_are_an_error():
    with auxiliary_losses(), torch.no_grad(), pytest.raises(ValueError, match="'z' is called with gradients"):
        auxiliary_loss("z", ONE)
    with torch.no_grad(), auxiliary_losses() as found:
        auxiliary_loss("z", ONE)
    assert found == {"z": 1.0}


def test_torchs_reentrant_checkpoint_would_train_nothing_and_is_refused():
    def reentrant(layer, x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    with auxiliary_losses(), pytest.raises(ValueError, match="use_reentrant=True.*write zbpp.checkpoint"):
        stack(reentrant)(double(5, 4).requires_grad_())


# ---------------------------------------------------------------- recompute


def nested(layer, x):
    return checkpoint(lambda x: checkpoint(layer, x) + 0.0, x)


def torchs(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def in_a_tuple(layer, x):
    return checkpoint(lambda x: (layer(x), None), x)[0]


def split(roots, root_grads):
    backward_input(roots, root_grads, ())[1].accumulate()


@pytest.mark.parametrize("backward", [torch.autograd.backward, split])
@pytest.mark.parametrize("call", [checkpoint, nested, torchs, in_a_tuple])
def test_a_recompute_counts_values_once_and_gradients_once(call, backward):
    g = double(5, 4, seed=1)
    output, sums, grads = expected(g)
    module = stack(call)
    with auxiliary_losses() as found:
        y = module(double(5, 4))
    half = torch.tensor(0.5).double()
    backward([y, *found.values()], [g, *(half for _ in found)])
    torch.testing.assert_close(y, output, rtol=1e-13, atol=0)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(sums, rel=1e-14)
    assert_close(grads_of(module), grads)


# ---------------------------------------------------------------- compilers


def test_a_module_that_reports_stays_eager_when_compiled_with_the_reason_and_its_neighbours_compile(caplog):
    with float64():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Reporting())
    module = copy.deepcopy(plain)
    compile_stage(module, backend="eager")
    for each in (plain, module):
        with auxiliary_losses() as found:
            y = each(double(5, 4))
        split([y, *found.values()], [double(5, 4, seed=1), *(torch.tensor(0.5).double() for _ in found)])
    assert len(found) == 2
    assert_close(grads_of(module), grads_of(plain))
    assert "stage 1 is not compiled, it stays eager: it calls zbpp.auxiliary_loss, which" in caplog.text
    assert "stage 0 is not compiled" not in caplog.text
