"""The weights of a run as a folder that transformers loads: read the run, ask its model, write the folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from zbpp.config import ConfigError, FinetuneConfig, naming, read_run_config
from zbpp.data.chat_template import template_text
from zbpp.run.model import build_model
from zbpp.training.lora import inject, peft_names, write_adapter
from zbpp.training.weights import weights_of_run

_log = logging.getLogger(__name__)


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
    if lora is None and is_merged:
        raise ConfigError(f"{run} has trained no adapter: leave --merge out")
    with _made_whole(folder) as unfinished:
        if lora is None:
            _export_whole(run, unfinished, config, of_numbers, file_size)
        elif is_merged:
            _export_merged(run, unfinished, config, lora, of_numbers, file_size)
        else:
            _export_adapter(run, unfinished, config, lora, of_numbers)
        _export_tokenizer(unfinished, config)


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


def _export_whole(
    run: Path, folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, file_size: str
) -> None:
    saved = weights_of_run(run)
    model = build_model(config["model"])
    described = _described(model)
    from zbpp.models.hf.export import write_folder  # only now: it needs the extra hf

    names = {model.library_name(name): name for name in saved.names}
    with naming(f"{run}"):
        write_folder(
            folder,
            described,
            list(names),
            lambda name: saved.read(names[name]),
            dtype=dtype,
            file_size=file_size,
            beside=getattr(model, "path", None),
        )


def _export_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the tokenizer and chat template that the run's data used, else those of the model's folder."""
    from zbpp.models.hf.export import write_tokenizer

    data, of_model = config.get("data") or {}, config["model"].get("path")
    found, template = None, None
    if isinstance(used := data.get("tokenizer"), str):
        found = Path(used).expanduser()
        if not found.exists():
            _log.warning("the run's data.tokenizer=%s is not here (looked from %s)", used, Path.cwd())
            found = None
    if isinstance(given := data.get("chat_template"), str):
        try:
            template = template_text(given)
        except ValueError as error:
            _log.warning("the run's data.%s", error)
    if found is None and isinstance(of_model, str):
        found = Path(of_model).expanduser()
    if found is not None:
        write_tokenizer(folder, found, template)


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
    adapters = {
        name: each if dtype is None else each.to(dtype) for name, each in _adapters(run, config, lora).items()
    }
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

    options: dict[str, Any] = {"dtype": dtype, "file_size": file_size}
    with TemporaryDirectory() as adapter:
        _export_adapter(run, Path(adapter), config, lora, None)
        quantization = build_model(config["model"]).quantization
        write_merged(folder, Path(base), Path(adapter), quantization=quantization, **options)


def _adapters(run: Path, config: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Tensor]:
    """The adapter's tensors by peft's names."""
    if (run / "adapter").is_dir():
        from safetensors.torch import load_file

        found: dict[str, Tensor] = load_file(run / "adapter" / "adapter_model.safetensors")
        return found
    saved = weights_of_run(run)
    from zbpp.models.hf.shrink import build_on_meta

    whole = build_on_meta(_described(build_model(config["model"])))
    with torch.device("meta"):
        inject(whole, lora, seed=0)
    return {of_peft: saved.read(name) for of_peft, name in peft_names(whole).items()}
