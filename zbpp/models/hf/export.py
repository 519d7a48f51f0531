"""Writes weights as a folder that transformers loads: config, safetensors, generation config, tokenizer.

The tensors of one layer are read, renamed and converted to the layout of the family's files (the reverse of
load.py), and collected until a file is full. So no more than one layer and one file are in memory.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbpp.models.hf.files import INDEX, SINGLE, WeightFiles
from zbpp.models.hf.load import FolderWeights
from zbpp.models.hf.shrink import build_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    "chat_template.jinja", "additional_chat_templates", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
_LAYER = re.compile(r"(.*?\.\d+)\.")


def write_folder(
    folder: Path,
    config: PretrainedConfig,
    names: Sequence[str],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype | None,
    bytes_per_file: int,
    beside: Path | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write the model's folder.

    names: of all tensors in the library's model. read(name): a tensor. dtype: of floating-point tensors;
    None: unchanged. bytes_per_file: the most of one safetensors file, unless a tensor is larger. beside: a
    folder whose tokenizer and generation config are copied. tokenizer: a tokenizer.json to copy if `beside`
    has none. `folder` appears when all is written. Raises ValueError for names that are not the model's.
    """
    model = build_on_meta(config)
    _check_names(model, names)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        files = _Files(unfinished, bytes_per_file)
        kept: torch.dtype | None = None
        for name, tensor in _tensors(model, names, read, dtype):
            files.add(name, tensor)
            kept = tensor.dtype if kept is None and tensor.is_floating_point() else kept
        files.close()
        _write_configs(unfinished, config, model, kept or torch.float32)
        _copy_beside(unfinished, beside, tokenizer)
        FolderWeights(
            WeightFiles(unfinished), build_on_meta(config)
        )  # raises ValueError unless the folder can be loaded
        with suppress(FileNotFoundError):
            folder.rmdir()  # an empty folder
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_merged(
    folder: Path, base: Path, adapter: Path, *, dtype: torch.dtype | None, bytes_per_file: int
) -> None:
    """Write the model in the folder `base` with a LoRA adapter merged into its weights, by peft.

    dtype: of the numbers; None: those of `base`. The whole model is in memory, in float32. Nothing is at
    `folder` until all is written.
    """
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    # The run's config names the folder, and somebody else may have written that config.
    own: Any = {"local_files_only": True, "trust_remote_code": False}
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True, **own)
        merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        merged.to(dtype or AutoConfig.from_pretrained(base, **own).dtype or torch.float32)
        merged.save_pretrained(unfinished, max_shard_size=bytes_per_file)
        for path in unfinished.glob("generation_config.json"):
            path.unlink()
        _copy_beside(unfinished, base, None)
        with suppress(FileNotFoundError):
            folder.rmdir()  # an empty folder
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_names(model: PreTrainedModel, names: Sequence[str]) -> None:
    expected = set(model.state_dict())
    if missing := sorted(expected - set(names)):
        raise ValueError(f"the run holds no {missing[0]} ({len(missing)} tensors of the model are missing)")
    if surplus := sorted(set(names) - expected):
        raise ValueError(
            f"the run holds {surplus[0]}, which {type(model).__name__} lacks ({len(surplus)} in all): "
            "is it a run of another model?"
        )


def _tensors(
    model: PreTrainedModel, names: Sequence[str], read: Callable[[str], Tensor], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """(name in the files, values) of each tensor to write."""
    from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = {*ties, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    written = sorted((name for name in names if name not in left_out), key=dot_natural_key)
    for _, group in groupby(written, key=_layer_of):
        tensors = {name: _cast(read(name), dtype) for name in group}
        yield from revert_weight_conversion(model, tensors).items()


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found else name


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write_configs(
    folder: Path, config: PretrainedConfig, model: PreTrainedModel, dtype: torch.dtype
) -> None:
    # Not the model's config, which may be a part of it that the library can't load by itself.
    config.dtype, config.architectures = dtype, [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        with suppress(ValueError):  # the library refuses some values that its own configs have
            model.generation_config.save_pretrained(folder)


def _copy_beside(folder: Path, beside: Path | None, tokenizer: Path | None) -> None:
    for name in _BESIDE if beside is not None else ():
        source = beside / name  # type: ignore[operator]  # not None here
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            shutil.copyfile(source, folder / name)
    if tokenizer is not None and tokenizer.is_file() and not (folder / "tokenizer.json").exists():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


class _Files:
    """Writes safetensors of up to `most` bytes each (or of one larger tensor), and an index for several."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._pending: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and sum(map(self._sizes.__getitem__, self._pending)) + size > self._most:
            self._flush()
        self._pending[name], self._sizes[name] = tensor.contiguous(), size

    def close(self) -> None:
        self._flush()
        if len(self._files) == 1:
            self._numbered(0).rename(self._folder / SINGLE)
            return
        places = {}
        for number, names in enumerate(self._files):
            final = f"model-{number + 1:05}-of-{len(self._files):05}.safetensors"
            self._numbered(number).rename(self._folder / final)
            places.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._numbered(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending = {}

    def _numbered(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
