"""Writes weights as a folder that transformers loads: config, safetensors, generation config, tokenizer.

Tensors get the names and the layout of the family's files by the library's own conversion, and
huggingface_hub divides them into files. The whole model is in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbpp.models.hf.shrink import build_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    "chat_template.jinja", "additional_chat_templates", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


def write_folder(
    folder: Path,
    config: PretrainedConfig,
    names: Sequence[str],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype | None,
    file_size: str,
    beside: Path | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write the model's folder.

    names: of all tensors in the library's model. read(name): a tensor. dtype: of floating-point tensors;
    None: unchanged. file_size: the most of one safetensors file, such as 2GB. beside: a folder whose
    tokenizer and generation config are copied. tokenizer: a tokenizer.json to copy if `beside` has none.
    Raises ValueError for names that are not the model's.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    model = build_on_meta(config)
    _check_names(model, names)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = {*ties, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    tensors = {name: _cast(read(name), dtype) for name in names if name not in left_out}
    kept = next((each.dtype for each in tensors.values() if each.is_floating_point()), torch.float32)
    with _made_whole(folder) as unfinished:
        written = revert_weight_conversion(model, tensors)
        whole = {name: _with_own_memory(each) for name, each in written.items()}
        save_torch_state_dict(whole, unfinished, max_shard_size=file_size)
        _write_configs(unfinished, config, model, kept)
        _copy_beside(unfinished, beside, tokenizer)


def write_merged(
    folder: Path, base: Path, adapter: Path, *, dtype: torch.dtype | None, file_size: str
) -> None:
    """Write the model in the folder `base` with a LoRA adapter merged into its weights, by peft.

    dtype: of the numbers; None: those of `base`. The whole model is in memory, in float32.
    """
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    # The run's config names the folder, and somebody else may have written that config.
    own: Any = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True, **own)
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.to(dtype or AutoConfig.from_pretrained(base, **own).dtype or torch.float32)
    with _made_whole(folder) as unfinished:
        merged.save_pretrained(unfinished, max_shard_size=file_size)
        (unfinished / "generation_config.json").unlink(missing_ok=True)
        _copy_beside(unfinished, base, None)


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets the name `folder` when all is written; removed after an error."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
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


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _with_own_memory(tensor: Tensor) -> Tensor:
    """A tensor that shares no memory, which safetensors refuses: one expert may be a part of a stack."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


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
