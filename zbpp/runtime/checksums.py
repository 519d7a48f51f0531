"""Checksums of tensors: of their bits and the places of these bits, exact in whatever order a device adds.

The tensor's memory is read as 32-bit words (as 16-bit or 8-bit ones if the bytes don't divide), and the
checksum is the sum of word times weight, modulo 2**64. The weights are odd: so a change of one word always
changes the checksum. They differ from place to place: so two words that change places are seen, too. Other
changes are missed with a probability of about 2**-32 or less.

A checksum stays on its device: nothing here waits for one. On a GPU it takes a temporary tensor of
twice the bytes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_WIDTH = 2**15  # words that have weights of their own; a longer tensor is a table with so many columns
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
# Odd numbers whose bits look random: those of the golden ratio, and a multiplier of splitmix64.
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def checksum(tensor: Tensor) -> Tensor:
    """An int64 scalar on the tensor's device. Layout is not part of it: bytes and their order are."""
    return _weighted_sum(_words(tensor))


def _weighted_sum(words: Tensor) -> Tensor:
    weights = _weights(words.device)
    if words.numel() <= _WIDTH:
        return (words * weights[: words.numel()]).sum(dtype=torch.int64)
    whole = words.numel() // _WIDTH * _WIDTH
    table = words[:whole].view(-1, _WIDTH)
    if words.device.type == "cpu":  # row by row: the product stays in the cache, ten times as fast
        sums = torch.stack([(row * weights).sum(dtype=torch.int64) for row in table])
    else:
        sums = (table * weights).sum(1, dtype=torch.int64)
    return _weighted_sum(torch.cat([sums, _weighted_sum(words[whole:]).view(1)]))


def _words(tensor: Tensor) -> Tensor:
    """The memory of a tensor as a row of signed integers."""
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    plain = plain.resolve_neg().contiguous().view(-1)
    num_bytes, size = plain.numel() * plain.element_size(), plain.element_size()
    width = next(each for each in _WORDS if num_bytes % each == 0)
    if plain.storage_offset() * size % width:
        plain = plain.clone()  # torch refuses to read wider words there
    return plain.view(_WORDS[width])


@cache
def _weights(device: torch.device) -> Tensor:
    numbers = torch.arange(1, _WIDTH + 1, dtype=torch.int64, device=device) * _STEP
    return ((numbers ^ (numbers >> 29)) * _MIX) | 1
