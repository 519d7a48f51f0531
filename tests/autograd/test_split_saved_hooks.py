"""The split backward when saved tensors are packed away: what W needs is unpacked late, or in B."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from helpers.cases import saved_hooks as cases
from helpers.cases.saved_hooks import network
from helpers.split import CountCalls, linear_weights
from zbpp import backward_input


def test_save_on_cpu_is_deferred_like_any_other():
    facts = cases.layers_under_save_on_cpu().compare()
    assert facts.deferred == linear_weights(network())


def test_what_save_on_cpu_packed_for_w_is_unpacked_in_w():
    """Between B and W it stays where it is. A node that B runs unpacks, for itself, all that it saved."""
    unpacked = []

    class Recorded(save_on_cpu):
        def __init__(self):
            super().__init__()
            unpack = self.unpack_hook

            def recorded(packed):
                unpacked.append(tuple(packed[1].shape))
                return unpack(packed)

            recorded.__qualname__ = unpack.__qualname__
            self.unpack_hook = recorded

    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    with Recorded():
        output = module(torch.randn(5, 4))
    _, weight_grads = backward_input(output, torch.ones(5, 3), ())
    assert sorted(unpacked) == [(5, 8), (8, 3)]  # the second layer's; the first, on stage 0, does not run
    weight_grads.accumulate()
    assert sorted(unpacked[2:]) == [(5, 4), (5, 8)]


def test_other_hooks_are_unpacked_once_and_in_b():
    """Unpacking may be costly, or, as a checkpoint's, run a forward: autograd does it when it comes there."""
    packed, unpacked = CountCalls(), CountCalls()

    def hooks():
        return saved_tensors_hooks(lambda t: packed() or t, lambda t: unpacked() or t)

    module = network()
    with hooks():
        output = module(torch.randn(5, 4, requires_grad=True))
    num_packed = packed.number
    _, weight_grads = backward_input(output, torch.ones(5, 4), ())
    assert 0 < unpacked.number <= num_packed
    in_b = unpacked.number
    weight_grads.accumulate()
    assert unpacked.number == in_b


def test_hooks_that_change_what_is_saved_are_obeyed():
    """float32 packed as bfloat16: the gradients are those of the rounded activations."""
    facts = cases.hooks_that_change_what_is_saved().compare()
    # A bias needs nothing but dy, yet waits only with its weight.
    assert facts.deferred == set()


def test_hooks_around_one_layer_leave_the_others_deferred():
    facts = cases.hooks_around_one_layer().compare()
    assert facts.deferred == {"first.weight", "first.bias", "third.weight", "third.bias"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_saved_tensor_changed_in_place_is_noticed(when):
    """Before B, as in plain autograd. After it, what W holds is not to be written to."""
    layer = nn.Linear(4, 4)
    x = torch.randn(5, 4)
    output = layer(x)
    if when == "before":
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward_input(output, torch.ones(5, 4), ())
    else:
        _, weight_grads = backward_input(output, torch.ones(5, 4), ())
        weight_grads.accumulate()
        assert layer.weight.grad is not None
