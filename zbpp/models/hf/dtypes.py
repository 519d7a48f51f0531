"""The dtypes that the library's from_pretrained(dtype=) gives the tensors of a model.

A model is built with `dtype` as torch's default, and some of its tensors name another one: a table of rotary
frequencies, say. A family may also name weights that stay in float32, such as a router's.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zbpp.models.hf.shrink import build_on_meta
from zbpp.models.hf.values import no_fake_mode

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def dtypes_of(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """{name: dtype} of the model's floating-point parameters and buffers; a tied one has several names."""
    model = build_on_meta(config, dtype)
    found = {name: each.dtype for name, each in named_tensors(model)}
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    with no_fake_mode():
        saved = model.state_dict().keys()
    for name in found.keys() & saved:
        for pattern, kept in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                found[name] = kept
    return found


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The floating-point parameters and buffers, under all their names."""
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return [(name, each) for name, each in chain(*named) if each.is_floating_point()]
