"""The weights of a run as a folder that transformers loads: read the run, ask its model, write the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from zbpp.config import ConfigError, FinetuneConfig, naming, read_run_config
from zbpp.run.model import build_model
from zbpp.training.fine_tuned import is_adapter, peft_name, write_adapter
from zbpp.training.weights import weights_of_run


def export(
    run: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    file_size: str,
    is_merged: bool = False,
) -> None:
    """Write the model that `run` has trained to `folder`. Raises ValueError or ConfigError.

    run: the run's folder, or that of one of its checkpoints. dtype: of the numbers in the files; None: as
    the run saved them. is_merged: for a run that trained adapters; else the adapter alone is written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and not empty: name another folder")
    of_run = (
        run if (run / "config.yaml").exists() else run.resolve().parent.parent
    )  # run: .../checkpoints/step-200
    if not run.is_dir() or not (of_run / "config.yaml").exists():
        weights_of_run(run)  # may say more
    config = read_run_config(of_run / "config.yaml")
    of_numbers: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    lora = FinetuneConfig(lora=(config.get("finetune") or {}).get("lora") or {}).adapters
    if lora is not None and is_merged:
        _export_merged(run, folder, config, lora, of_numbers, file_size)
    elif lora is not None:
        _export_adapter(run, folder, config, lora, of_numbers)
    elif is_merged:
        raise ConfigError(f"{run} has trained no adapter: leave --merge out")
    else:
        _export_whole(run, folder, config, of_numbers, file_size)


def _export_whole(
    run: Path, folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, file_size: str
) -> None:
    saved = weights_of_run(run)
    model = build_model(config["model"])
    described = _described(model)
    from zbpp.models.hf.export import write_folder  # only now: it needs the extra hf

    names = {model.library_name(name): name for name in saved.names}
    tokenizer = config.get("data", {}).get("tokenizer")
    with naming(f"{run}"):
        write_folder(
            folder,
            described,
            list(names),
            lambda name: saved.read(names[name]),
            dtype=dtype,
            file_size=file_size,
            beside=getattr(model, "path", None),
            tokenizer=Path(tokenizer) if isinstance(tokenizer, str) else None,
        )


def _described(model: Any) -> Any:
    """The library's config of the model. Raises ConfigError for a model that transformers does not have."""
    if not (hasattr(model, "library_config") and hasattr(model, "library_name")):
        raise ConfigError(
            f"the run trained a {type(model).__name__}, which transformers does not have: only "
            "model=huggingface and the llama models can be exported; its weights are in the run's "
            "stage-*.safetensors"
        )
    return model.library_config()


def _export_adapter(
    run: Path,
    folder: Path,
    config: Mapping[str, Any],
    lora: dict[str, Any],
    dtype: torch.dtype | None,
) -> None:
    """Write the folder that peft loads. Raises ConfigError for an adapter that peft can't load."""
    kind = config["model"].get("_target_")
    if kind != "zbpp.models.hf.HuggingFace":
        raise ConfigError(
            f"{run} has trained adapters of {kind}, whose modules have other names than in transformers: "
            f"only those of model=huggingface load in peft; the adapters are in {run / 'adapter'}"
        )
    adapters = {name: each if dtype is None else each.to(dtype) for name, each in _adapters(run).items()}
    write_adapter(folder, adapters, lora, config["model"].get("path"))


def _export_merged(
    run: Path,
    folder: Path,
    config: Mapping[str, Any],
    lora: dict[str, Any],
    dtype: torch.dtype | None,
    file_size: str,
) -> None:
    """Write the base model with the adapter merged into it. Raises ConfigError for a run without one."""
    base = config["model"].get("path")
    if base is None:
        raise ConfigError(
            f"{run} has trained adapters of a model without model.path, whose weights no folder holds: leave "
            "--merge out"
        )
    from zbpp.models.hf.export import write_merged

    with TemporaryDirectory() as adapter:
        _export_adapter(run, Path(adapter), config, lora, None)
        write_merged(folder, Path(base), Path(adapter), dtype=dtype, file_size=file_size)


def _adapters(run: Path) -> dict[str, Tensor]:
    """The adapter's tensors by peft's names."""
    if (run / "adapter").is_dir():
        from safetensors.torch import load_file

        found: dict[str, Tensor] = load_file(run / "adapter" / "adapter_model.safetensors")
        return found
    saved = weights_of_run(run)
    return {peft_name(name): saved.read(name) for name in saved.names if is_adapter(name)}
