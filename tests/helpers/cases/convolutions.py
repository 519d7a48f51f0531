"""Cases: convolutions."""

from types import MappingProxyType

import torch
from torch import nn

from helpers.split import Case, leaf

SIZES = {1: (9,), 2: (9, 8), 3: (5, 6, 7)}


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def convolution(dimensions=1, settings=MappingProxyType({})) -> Case:
    return Case(lambda: CONVOLUTIONS[dimensions](4, 8, 3, **settings), lambda: leaf(2, 4, *SIZES[dimensions]))


def transposed_convolution(dimensions=1, settings=MappingProxyType({})) -> Case:
    return Case(lambda: TRANSPOSED[dimensions](4, 8, 3, **settings), lambda: leaf(2, 4, *SIZES[dimensions]))


def convolution_with_padding_mode(padding_mode="circular") -> Case:
    return Case(lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode=padding_mode), lambda: leaf(2, 4, 5, 6))


def convolution_of_unbatched_input() -> Case:
    return Case(lambda: nn.Conv2d(4, 8, 3), lambda: leaf(4, 7, 6))


def channels_last(weights_too=False, strides=None) -> Case:
    strides = [] if strides is None else strides
    layout = torch.channels_last if weights_too else torch.contiguous_format

    def make_module():
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=layout)

    def make_input():
        return leaf(2, 4, 9, 8).detach().to(memory_format=torch.channels_last).requires_grad_()

    def call(module, x):
        strides.append({name: p.stride() for name, p in module.named_parameters()})
        return module(x)

    return Case(make_module, make_input, call)
