"""Writes a folder that transformers loads: config, safetensors, generation config, tokenizer.

Tensors get the names and the layout of the family's files by the library's own conversion, and
huggingface_hub divides them into files. The whole model is in memory.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbpp.models.hf.dtypes import dtypes_of, named_tensors
from zbpp.models.hf.quantize import quantization_states, transposed_layers
from zbpp.models.hf.shrink import build_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from zbpp.models.hf.quantize import Quantization

_log = logging.getLogger(__name__)

_GENERATION = "generation_config.json"
_FURTHER_TOKENS = (  # how many layers predict further tokens, by the names of different families
    "num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules",
)  # fmt: skip
_TEMPLATES = ("chat_template.json", "chat_template.jinja", "additional_chat_templates")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "sentencepiece.bpe.model",
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
) -> None:
    """Write the model into `folder`, which is there.

    names: of all tensors in the library's model. read(name): a tensor. dtype: of floating-point tensors, but
    for those that from_pretrained(dtype=) keeps in another one; None: unchanged. file_size: the most of one
    safetensors file, such as 2GB. beside: a folder whose generation config is copied. Raises ValueError for
    names that are not the model's.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    model = build_on_meta(config)
    _check_names(model, names)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = {*ties, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    dtypes = {} if dtype is None else dtypes_of(config, dtype)
    tensors = {name: read(name).to(dtypes.get(name)) for name in names if name not in left_out}
    written = revert_weight_conversion(model, tensors)
    whole = {name: _with_own_memory(each) for name, each in written.items()}
    save_torch_state_dict(whole, folder, max_shard_size=file_size)
    _write_configs(folder, config, model, dtype or _most_common(tensors.values()))
    _copy(beside, folder, [_GENERATION])


def write_merged(
    folder: Path,
    base: Path,
    adapter: Path,
    *,
    dtype: torch.dtype | None,
    file_size: str,
    quantization: Quantization | None = None,
) -> None:
    """Write the model in the folder `base` with a LoRA adapter merged into its weights, by peft.

    dtype: of the numbers; None: those of `base`. quantization: of the base that the adapter was trained on;
    it is merged into the dequantized weights. The whole model is in memory, in float32.
    """
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    # The run's config names the folder, and somebody else may have written that config.
    own: Any = {"local_files_only": True, "trust_remote_code": False}
    read: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
    if quantization is not None:
        read["dtype"] = quantization.dtype
        if not quantization.is_of_folder:
            read["quantization_config"] = quantization.config
    model, transposed = AutoModelForCausalLM.from_pretrained(base, **read, **own), list[str]()
    if quantization is not None:
        _log.warning("the adapter is merged into the weights that %s has made of the base", quantization.kind)
        for state in quantization_states(model):
            state.dtype = torch.float32  # else they are rounded to the dtype that they had before
        transposed = transposed_layers(model)
        model = model.dequantize(torch.float32).float()  # type: ignore[no-untyped-call]  # the library's
        _forget_deserialization(model)
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    for name in transposed:
        weight = merged.get_submodule(name).weight
        weight.data = weight.data.T.contiguous()
    _forget_unmade_layers(merged.config, merged)
    config = AutoConfig.from_pretrained(base, **own)
    dtypes = dtypes_of(config, dtype or config.dtype or torch.float32)
    for name, each in named_tensors(merged):
        each.data = each.data.to(dtypes[name])
    merged.save_pretrained(folder, max_shard_size=file_size)
    (folder / _GENERATION).unlink(missing_ok=True)
    _copy(base, folder, [_GENERATION])


def _forget_deserialization(model: PreTrainedModel) -> None:
    """Let save_pretrained not undo how quantized weights were read, which it can't; they are dequantized."""
    conversions: Any = model._weight_conversions
    kept: Any = [
        each
        for each in conversions or ()
        if not any(hasattr(operation, "hf_quantizer") for operation in getattr(each, "operations", ()))
    ]
    model._weight_conversions = kept


def _check_names(model: PreTrainedModel, names: Sequence[str]) -> None:
    expected = set(model.state_dict())
    if missing := sorted(expected - set(names)):
        raise ValueError(f"the run holds no {missing[0]} ({len(missing)} tensors of the model are missing)")
    if surplus := sorted(set(names) - expected):
        raise ValueError(
            f"the run holds {surplus[0]}, which {type(model).__name__} lacks ({len(surplus)} in all): "
            "is it a run of another model?"
        )


def _most_common(tensors: Iterable[Tensor]) -> torch.dtype:
    """The floating-point dtype that most numbers have."""
    counts = Counter[torch.dtype]()
    for each in tensors:
        counts[each.dtype] += each.numel() if each.is_floating_point() else 0
    return counts.most_common(1)[0][0]


def _with_own_memory(tensor: Tensor) -> Tensor:
    """A tensor that shares no memory, which safetensors refuses: one expert may be a part of a stack."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_configs(
    folder: Path, config: PretrainedConfig, model: PreTrainedModel, dtype: torch.dtype
) -> None:
    # Not the model's config, which may be a part of it that the library can't load by itself.
    config.dtype, config.architectures = dtype, [type(model).__name__]
    _forget_unmade_layers(config, model)
    config.save_pretrained(folder)
    if model.can_generate():
        with suppress(ValueError):  # the library refuses some values that its own configs have
            model.generation_config.save_pretrained(folder)


def _forget_unmade_layers(config: PretrainedConfig, model: PreTrainedModel) -> None:
    """Let a config name no layers that predict further tokens if the model has none: no file holds them.

    transformers makes these layers only to generate; who loads the folder would look for them.
    """
    if any("mtp" in name or "nextn" in name for name in model.state_dict()):
        return
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for name in _FURTHER_TOKENS:
            if number := getattr(part, name, None):
                _log.warning(
                    "config.json gets %s=0, not %s: the run trained no such layers",
                    name,
                    number,
                )
                setattr(part, name, 0)


def write_tokenizer(folder: Path, tokenizer: Path, chat_template: str | None = None) -> None:
    """Copy a tokenizer to `folder`: its folder's files, or a tokenizer.json and the files beside it.

    chat_template: jinja in place of the tokenizer's own templates; None: its own.
    """
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    _copy(source, folder, [*_TOKENIZER, *(_TEMPLATES if chat_template is None else ())])
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    if chat_template is not None:  # goes before one in tokenizer_config.json
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _copy(source: Path | None, folder: Path, names: Sequence[str]) -> None:
    """Copy those of these files and folders that `source` has."""
    for each in [] if source is None else [source / name for name in names]:
        if each.is_dir():
            shutil.copytree(each, folder / each.name)
        elif each.exists():
            shutil.copyfile(each, folder / each.name)
