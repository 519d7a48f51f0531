"""The split backward of convolutions: every dimension, transposed, grouped, dilated, in any memory format."""

import pytest

from helpers.cases import convolutions as cases

SETTINGS = [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"dilation": 2},
    {"groups": 2},
    {"groups": 4, "padding": 1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_is_deferred(dimensions, settings):
    facts = cases.convolution(dimensions, settings).compare()
    assert facts.deferred == ({"weight", "bias"} if settings.get("bias", True) else {"weight"})


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": False}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2}],
    ids=str,
)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_is_deferred(dimensions, settings):
    facts = cases.transposed_convolution(dimensions, settings).compare()
    assert facts.deferred == ({"weight", "bias"} if settings.get("bias", True) else {"weight"})


@pytest.mark.parametrize("padding_mode", ["circular", "reflect", "replicate"])
def test_a_convolution_with_padding_of_its_own_is_deferred(padding_mode):
    facts = cases.convolution_with_padding_mode(padding_mode).compare()
    assert facts.deferred == {"weight", "bias"}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_convolution_with_padding_by_name_is_right(padding):
    cases.convolution_with_padding_by_name(padding).compare()


def test_a_convolution_of_an_unbatched_input_is_deferred():
    """The input gains a dimension on the way."""
    facts = cases.convolution_of_unbatched_input().compare()
    assert facts.deferred == {"weight", "bias"}


@pytest.mark.parametrize("weights_too", [False, True])
def test_channels_last_is_deferred_and_its_gradient_keeps_the_weights_layout(weights_too):
    strides = []
    facts = cases.channels_last(weights_too, strides).compare()
    assert len(facts.deferred) == 4
    assert {name: grad.stride() for name, grad in facts.grads.items()} == strides[0]


def test_an_unfolded_convolution_is_deferred():
    """A patch embedding: its kernel is its stride."""
    facts = cases.unfolded_convolution().compare()
    assert facts.deferred == {"weight", "bias"}


def test_a_convolutions_weight_used_twice_waits_for_both():
    facts = cases.convolution_with_weight_used_twice().compare()
    assert facts.deferred == {"weight", "bias"}


def test_a_frozen_convolution_passes_the_gradient_on():
    facts = cases.frozen_convolution().compare()
    assert facts.deferred == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_input_without_grad_costs_no_input_gradient():
    facts = cases.convolution_of_input_without_grad().compare()
    assert len(facts.deferred) == 4
