"""A stage of a model, small or large, built by a cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zbpp.models.hf.cut import Cut, CutError
from zbpp.models.hf.dtypes import dtypes_of
from zbpp.models.hf.init import initialise
from zbpp.models.hf.load import FolderWeights
from zbpp.models.hf.quantize import Quantization
from zbpp.models.hf.shrink import build_on_meta
from zbpp.models.hf.stage import FirstStage, LastStage, OnlyStage, Stage
from zbpp.models.hf.ties import names_of
from zbpp.models.hf.values import has_values, no_fake_mode

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_stage(
    config: PretrainedConfig,
    cut: Cut,
    index: int,
    seed: int,
    weights: FolderWeights | None = None,
    dtype: torch.dtype = torch.float32,
    head: str = "auto",
    quantization: Quantization | None = None,
) -> Stage:
    """A stage with its initial values, on the CPU; tensors of other stages are never allocated.

    head: one of layers.HEADS; the last stage computes the loss itself if it can.
    weights: the folder that its tensors are read from, as from_pretrained(dtype=) reads them; what the folder
    does not hold, such as tables of positions, gets the library's initial values. quantization: of the
    weights that are read. Raises CutError unless the model has exactly the parameters that the cut names.
    """
    model = build_on_meta(config)
    if quantization is not None:
        quantization.prepare(model)
    names = set(names_of(model))
    if names != cut.owners.keys():
        other = min(names ^ cut.owners.keys())
        raise CutError(f"{other}: a small copy of the config has other parameters, and can't check the cut")
    inside = f"{cut.path}."
    own_layers = tuple(f"{inside}{number}." for number in cut.layers[index])

    def is_own(name: str) -> bool:
        if name in cut.owners:
            return cut.owners[name] == index
        return name.startswith(own_layers) or not name.startswith(inside)

    # Without values, as on the meta device, nothing is read.
    files = weights if has_values(torch.empty(0)) else None
    initialise(model, seed, lambda name: is_own(name) and not (files and files.holds(name)), cut.constants)
    if weights is not None:
        dtypes = dtypes_of(config, dtype)
        with no_fake_mode():  # parameters on the meta device are of no such mode
            for name, parameter in model.named_parameters():
                if type(parameter) is nn.Parameter:  # what will be quantized has a class of its own
                    parameter.data = parameter.data.to(dtypes.get(name))
    if files is not None:
        own = [name for name in model.state_dict() if is_own(name) and files.holds(name)]
        files.load(model, own, dtype, None if quantization is None else quantization.quantizer)
    elif quantization is not None:
        quantization.leave_empty(model)
    stage = _stage(model, cut, index, head)
    if quantization is not None:
        quantization.freeze(stage)
    return stage


def _stage(model: PreTrainedModel, cut: Cut, index: int, head: str) -> Stage:
    is_last = index == len(cut.layers) - 1
    if not is_last or head == "whole" or not cut.head or type(model.get_submodule(cut.head)) is not nn.Linear:
        return (Stage if index else FirstStage)(model, cut, index)
    return (LastStage if index else OnlyStage)(model, cut, index, keeps_logits=head != "recompute")
