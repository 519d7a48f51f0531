"""The library's config of a model, from a mapping, a file or a folder; and whether the data fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(config: Mapping[str, Any] | str, sizes: Mapping[str, int]) -> PretrainedConfig:
    """The library's config, from a mapping or a file.

    sizes: the data's vocabulary and sequence length, by the config's names for them. Raises ValueError for a
    config of no causal language model, and if the data are larger.
    """
    from transformers import AutoConfig, PretrainedConfig  # lazily: three seconds, and optional

    if isinstance(config, str) and Path(config).is_dir():
        raise ValueError(
            f"config={config} is a folder, and config starts from random weights: write path={config} to "
            f"load its weights, or config={Path(config) / 'config.json'} to take the config alone"
        )
    given = PretrainedConfig.get_config_dict(config)[0] if isinstance(config, str) else dict(config)
    _check_kind(given, "config")
    known: dict[str, Any] = given
    if not isinstance(config, str):  # a size that a file does not name is the library's default
        known = {**_unset_sizes(AutoConfig.for_model(given["model_type"]), given, sizes), **given}
    return _checked(AutoConfig.for_model(**known), sizes)


def read_folder(folder: Path, overrides: Mapping[str, Any], sizes: Mapping[str, int]) -> PretrainedConfig:
    """The config of a folder with weights. overrides: values to replace some of its config.json.

    Raises ValueError as `read_config` does, and for quantized weights.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.exists():
        raise ValueError(
            f"path={folder} has no config.json: write a folder with config.json and safetensors; to get a "
            "model of the Hub, run: hf download NAME --local-dir FOLDER"
        )
    try:
        given = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    _check_kind(given, str(path))
    method = (given.get("quantization_config") or {}).get("quant_method", "bitsandbytes")
    if method != "bitsandbytes":
        raise ValueError(
            f"{path} describes quantized weights ({method}), which can't be read: "
            "write the folder of the original model, with quantize=nf4, fp4 or int8 to train adapters on it"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's own checks of the values raise no ValueError
        raise ValueError(f"{path} does not fit together: {_last_line(error)}") from error
    vars(config).pop("quantization_config", None)  # a Quantization has it
    for name in overrides:
        if not hasattr(config, name):
            raise ValueError(f"overrides.{name}: {path} has no such key; write one that it has")
    try:
        changed = type(config).from_dict({**config.to_dict(), **overrides})
    except Exception as error:  # as above
        given = ", ".join(f"{name}={value}" for name, value in overrides.items())
        raise ValueError(f"overrides.{given} does not fit {path}: {_last_line(error)}") from error
    return _checked(changed, sizes)


def quantized_as(folder: Path) -> dict[str, Any] | None:
    """How the weights in a folder are quantized, by its config.json; None if they are not."""
    path = folder / "config.json"
    try:
        found: dict[str, Any] | None = json.loads(path.read_text()).get("quantization_config")
    except (OSError, ValueError):  # read_folder says why
        return None
    return found


def _last_line(error: Exception) -> str:
    """The last line of the library's message, which says what is wrong; those before name its checks."""
    return str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the language model."""
    found: PretrainedConfig = config.get_text_config(decoder=True)
    return found


def without_cache(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a config for training: without a cache, and without the router's logits."""
    copy = deepcopy(config)
    copy.use_cache = text_config(copy).use_cache = False
    for part in (copy, text_config(copy)):
        if asks_for_balance(part):
            part.output_router_logits = False
    return copy


def asks_for_balance(config: PretrainedConfig) -> bool:
    """Whether the library would add a loss that balances experts."""
    return any(getattr(part, "output_router_logits", False) for part in (config, text_config(config)))


def _checked(config: PretrainedConfig, sizes: Mapping[str, int]) -> PretrainedConfig:
    """The config. Raises ValueError if the data are larger."""
    for name, size in sizes.items():
        largest = getattr(text_config(config), name, None)
        if isinstance(largest, int) and size > largest:
            ours = {"max_position_embeddings": "sequence_length"}.get(name, name)
            raise ValueError(
                f"{ours}={size} is more than the config's {name}={largest}: write {ours}={largest} or less, "
                f"or config.{name}={size}"
            )
    return config


def _check_kind(given: Mapping[str, Any], where: str) -> None:
    """Raises ValueError unless the config names a causal language model that the library has."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    attention = given.get("attn_implementation") or given.get("_attn_implementation")
    if "/" in str(attention):  # the library would download it, and run it
        raise ValueError(f"{where}: attn_implementation={attention} is code from a hub: write sdpa or eager")
    kind = given.get("model_type")
    if kind is None:
        raise ValueError(f"{where} has no model_type: write one of Hugging Face's, such as llama")
    if kind in causal:
        return
    raise ValueError(
        f"{where}: model_type={kind} is no causal language model of transformers {transformers.__version__}: "
        "a class of your own can cut any other model, see docs/huggingface.md"
    )


def _unset_sizes(
    default: PretrainedConfig, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The sizes of the data for which this family's config has a key that `given` does not set."""
    own_names = default.attribute_map
    return {
        name: size
        for name, size in sizes.items()
        if hasattr(default, name) and name not in given and own_names.get(name, name) not in given
    }
