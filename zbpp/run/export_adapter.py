"""The adapter of a LoRA run as a folder that peft loads, or merged into the weights of its base model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from zbpp.config import ConfigError, LoraConfig
from zbpp.training.lora import is_adapter, peft_name, write_adapter
from zbpp.training.weights import weights_of_run


def lora_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of a run's LoRA; None: the run trained without. config: that of the run."""
    return LoraConfig(**((config.get("finetune") or {}).get("lora") or {})).options


def export_adapter(
    run: Path, folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None = None
) -> None:
    """Write the adapter that a run has saved at its end, else that of its newest whole checkpoint.

    run: the run's folder, or that of a checkpoint. dtype: of the numbers; None: as they are saved. Raises
    ConfigError for a run whose adapter peft can't load.
    """
    kind = config["model"].get("_target_")
    if kind != "zbpp.models.hf.HuggingFace":
        raise ConfigError(
            f"{run} has trained adapters of {kind}, whose modules have other names than in transformers: "
            f"only those of model=huggingface load in peft; the adapters are in {run / 'adapter'}"
        )
    options = lora_options(config)
    assert options is not None  # the caller has asked
    adapters = {name: each if dtype is None else each.to(dtype) for name, each in _adapters(run).items()}
    write_adapter(folder, adapters, options, config["model"].get("path"))


def export_merged(
    run: Path,
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    bytes_per_file: int,
) -> None:
    """Write the base model with the run's adapter merged into its weights, see `write_merged`.

    Raises ConfigError for a run that had no base model.
    """
    base = config["model"].get("path")
    if base is None:
        raise ConfigError(
            f"{run} has trained adapters of a model without model.path, whose weights no folder holds: leave "
            "--merge out"
        )
    from zbpp.models.hf_export import write_merged

    with TemporaryDirectory() as adapter:
        export_adapter(run, Path(adapter), config)
        write_merged(folder, Path(base), Path(adapter), dtype=dtype, bytes_per_file=bytes_per_file)


def _adapters(run: Path) -> dict[str, Tensor]:
    """The adapter's tensors by peft's names."""
    if (run / "adapter").is_dir():
        from safetensors.torch import load_file

        found: dict[str, Tensor] = load_file(run / "adapter" / "adapter_model.safetensors")
        return found
    saved = weights_of_run(run)
    return {peft_name(name): saved.read(name) for name in saved.names if is_adapter(name)}
