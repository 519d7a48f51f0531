"""Codes: fewer bytes for the numbers of a message, and back.

A coded message has two entries for each tensor of the message. They say how to decode the tensor, and None
costs no byte:

    tensor                     coded message
    float32, in 8 bits         int8, as many numbers      float32, one scale per row
    float32, in bfloat16       None                       bfloat16
    as it was                  the tensor, or None        None

A row is the last dimension. Its scale is its largest absolute value / 126, in the tensor's own dtype, and a
code is number / scale, rounded: to the nearest, or up or down by chance, so that the code's mean over seeds
is number / scale. Rounding up leads to 127 at most. A row with NaN or infinity decodes to NaN and infinities.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor

from zbpp.runtime.layout import Message

Form = Literal["bfloat16", "8bit"]

_LEVELS = 126
CODED: dict[str, set[torch.dtype]] = {
    "bfloat16": {torch.float32},
    "8bit": {torch.float32, torch.float64, torch.bfloat16},
}
"""{form: the dtypes that it changes}."""


def coded(x: Message, form: Form) -> Message:
    """An x in codes, to the nearest. Tensors that require no grad stay: masks and positions are exact."""
    return _coded(x, form, [each is not None and each.requires_grad for each in x], None)


def coded_gradient(g: Message, form: Form, seed: int) -> Message:
    """A g in codes; 8 bits are rounded by chance, from this seed."""
    device = next((each.device for each in g if each is not None), torch.device("cpu"))
    return _coded(g, form, [True] * len(g), Generator(device).manual_seed(seed))


@torch.no_grad()
def _coded(message: Message, form: Form, chosen: list[bool], generator: Generator | None) -> Message:
    entries: list[Tensor | None] = []
    for tensor, is_chosen in zip(message, chosen, strict=True):
        if tensor is None or not is_chosen or tensor.dtype not in CODED[form] or not tensor.dim():
            entries += [tensor, None]
        elif form == "bfloat16":
            entries += [None, tensor.bfloat16().requires_grad_(tensor.requires_grad)]
        else:
            entries += _in_8_bits(tensor, generator)
    return tuple(entries)


def _in_8_bits(tensor: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Codes and scales, given a generator of what is added before rounding down; None: to the nearest."""
    wide = tensor.to(_wide(tensor.dtype))
    scale = (wide.abs().amax(-1, keepdim=True) / _LEVELS).to(tensor.dtype)
    scale.clamp_(min=torch.finfo(scale.dtype).tiny)  # of a smaller one codes would not fit into 8 bits
    codes = wide / scale
    if generator is None:
        codes.round_()
    else:
        chance = torch.rand(codes.shape, generator=generator, dtype=codes.dtype, device=codes.device)
        codes.add_(chance).floor_()
    return codes.to(torch.int8), scale.requires_grad_(tensor.requires_grad)


@torch.no_grad()
def decoded(message: Message) -> Message:
    """The message that was coded, with rounded numbers."""
    return tuple([_decoded(*pair) for pair in zip(message[::2], message[1::2], strict=True)])


def _decoded(codes: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """A tensor, given its two entries."""
    if scale is None:
        return codes
    if codes is None:
        return scale.float().requires_grad_(scale.requires_grad)
    tensor = (codes.to(_wide(scale.dtype)) * scale).to(scale.dtype)
    return tensor.requires_grad_(scale.requires_grad)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What the numbers are computed in."""
    return torch.promote_types(dtype, torch.float32)
