"""A library's model of a folder, of which a rank reads its own tensors; all others are on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.models.hf import HuggingFace
from zbpp.models.hf.quantize import kind_and_options
from zbpp.models.hf.shrink import build_on_meta
from zbpp.models.hf.ties import aliases_of, assign


def read_own(
    folder: str,
    stages: Iterable[int],
    num_stages: int,
    layers_per_stage: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """The model in training mode, with the values of these stages.

    options: as `options_of_folder` takes them. Raises ValueError as that and `HuggingFace` do.
    """
    given = options_of_folder(folder, **options)
    cutter = HuggingFace(**given, layers_per_stage=layers_per_stage)
    model: Any = build_on_meta(cutter.library_config())
    model.config._name_or_path = folder
    model.config.dtype = getattr(torch, given["dtype"])
    quantization = cutter.quantization
    if quantization is not None:
        quantization.prepare(model)
    aliases = aliases_of(model)
    for index in stages:
        for owner, name, tensor in _tensors(cutter.build_stage(index, num_stages)):
            place = model.get_submodule(owner)
            (place._parameters if name in place._parameters else place._buffers)[name] = tensor
    for alias, source in aliases.items():  # both names have the tensor that was read
        found = [each for each in map(model.get_parameter, (source, alias)) if not each.is_meta]
        for name in (alias, source) if found else ():
            assign(model, name, found[0])
    if quantization is not None:
        quantization.finish(model)
    return model.train()


def options_of_folder(folder: str, **options: Any) -> dict[str, Any]:
    """The arguments of HuggingFace that mean these of from_pretrained.

    dtype and quantization_config, a BitsAndBytesConfig, are taken. Raises ValueError for others, and as
    `kind_and_options` does.
    """
    dtype = str(options.pop("dtype", None) or "float32").removeprefix("torch.")
    quantized, given = options.pop("quantization_config", None), dict[str, Any]()
    if quantized is not None:
        given["quantize"], given["quantize_options"] = kind_and_options(quantized)
    if others := [name for name, value in options.items() if value not in (None, False)]:
        raise ValueError(
            f"{others[0]}: a rank that reads its own tensors of a folder takes dtype and "
            "quantization_config alone: give AutoModelForCausalLM.from_pretrained(...) instead of the folder"
        )
    return {"path": folder, "dtype": dtype, **given}


def _tensors(stage: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(name of the module, name in it, tensor) of the tensors of a stage that have values."""
    for path, module in stage.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.is_meta:
                yield path, name, tensor
