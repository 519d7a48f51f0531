"""The split backward of convolutions: every dimension, transposed, grouped, dilated, in any memory format."""

import pytest
import torch
from torch import nn

from helpers.split import assert_equals_plain, leaf

SIZES = {1: (9,), 2: (9, 8), 3: (5, 6, 7)}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
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
    facts = assert_equals_plain(
        lambda: CONVOLUTIONS[dimensions](4, 8, 3, **settings), lambda: leaf(2, 4, *SIZES[dimensions])
    )
    assert facts.deferred == ({"weight", "bias"} if settings.get("bias", True) else {"weight"})


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": False}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2}],
    ids=str,
)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_is_deferred(dimensions, settings):
    facts = assert_equals_plain(
        lambda: TRANSPOSED[dimensions](4, 8, 3, **settings), lambda: leaf(2, 4, *SIZES[dimensions])
    )
    assert facts.deferred == ({"weight", "bias"} if settings.get("bias", True) else {"weight"})


@pytest.mark.parametrize("padding_mode", ["circular", "reflect", "replicate"])
def test_a_convolution_with_padding_of_its_own_is_deferred(padding_mode):
    facts = assert_equals_plain(
        lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode=padding_mode), lambda: leaf(2, 4, 5, 6)
    )
    assert facts.deferred == {"weight", "bias"}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_convolution_with_padding_by_name_is_right(padding):
    assert_equals_plain(lambda: nn.Conv2d(4, 8, 4, padding=padding), lambda: leaf(2, 4, 7, 6))


def test_a_convolution_of_an_unbatched_input_is_deferred():
    """The input gains a dimension on the way."""
    facts = assert_equals_plain(lambda: nn.Conv2d(4, 8, 3), lambda: leaf(4, 7, 6))
    assert facts.deferred == {"weight", "bias"}


@pytest.mark.parametrize("weights_too", [False, True])
def test_channels_last_is_deferred_and_its_gradient_keeps_the_weights_layout(weights_too):
    layout = torch.channels_last if weights_too else torch.contiguous_format

    def make_module():
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=layout)

    def make_input():
        return leaf(2, 4, 9, 8).detach().to(memory_format=torch.channels_last).requires_grad_()

    strides = []

    def call(module, x):
        strides.append({name: p.stride() for name, p in module.named_parameters()})
        return module(x)

    facts = assert_equals_plain(make_module, make_input, call)
    assert len(facts.deferred) == 4
    assert {name: grad.stride() for name, grad in facts.grads.items()} == strides[0]


def test_an_unfolded_convolution_is_deferred():
    """A patch embedding: its kernel is its stride."""
    facts = assert_equals_plain(lambda: nn.Conv2d(3, 8, 4, stride=4), lambda: leaf(2, 3, 8, 8))
    assert facts.deferred == {"weight", "bias"}


def test_a_convolutions_weight_used_twice_waits_for_both():
    class Twice(nn.Conv1d):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)))

    facts = assert_equals_plain(lambda: Twice(4, 4, 3, padding=1), lambda: leaf(2, 4, 7))
    assert facts.deferred == {"weight", "bias"}


def test_a_frozen_convolution_passes_the_gradient_on():
    def make_module():
        module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3))
        module[1].requires_grad_(False)
        return module

    facts = assert_equals_plain(make_module, lambda: leaf(2, 2, 9, 9))
    assert facts.deferred == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_input_without_grad_costs_no_input_gradient():
    facts = assert_equals_plain(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        lambda: torch.randn(2, 2, 9, 9),
    )
    assert len(facts.deferred) == 4
