"""Models and data from their config nodes, checked; and what there is to say of a model and a machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zbpp.config import ConfigError, build, naming
from zbpp.stage_api import PipelineModel
from zbpp.training.data import Data
from zbpp.training.loader import loaded_data


def build_model(node: dict[str, Any], seed: int = 0) -> Any:
    """The model that the node's `_target_` names; it gets the seed if it takes one and the node has none.

    Raises ConfigError.
    """
    model = build("model", node, **({} if "seed" in node else {"seed": seed}))
    if not isinstance(model, PipelineModel):
        raise ConfigError(
            f"model: {type(model).__name__} has no build_stage(index, num_stages) and loss(output, target); "
            "see zbpp/stage_api.py"
        )
    return model


def build_data(node: dict[str, Any], batch_size: int, seed: int) -> Data:
    """The data that the node's `_target_` makes, see `loaded_data`. Raises ConfigError."""
    given = build("data", node, batch_size=batch_size, seed=seed)
    if isinstance(given, Data):
        return given
    with naming(f"data ({node['_target_']})"):
        return loaded_data(given, batch_size=batch_size, seed=seed)


def check_fit(stages: Mapping[int, nn.Module], microbatch: Sequence[Any]) -> None:
    """Run stage 0, if it is among `stages`, on its inputs of one microbatch: do the data fit the model?

    In eval mode and without a graph, on the device where both are. Raises ConfigError.
    """
    if 0 not in stages:
        return
    modes = {module: module.training for module in stages[0].modules()}
    try:
        with fitting(f"stage 0 was given {', '.join(map(_in_words, microbatch))}"), torch.no_grad():
            stages[0].eval()(*microbatch)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def fitting(given: str) -> Iterator[None]:
    """Turn what a forward raises of data that don't fit the model into a ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        told = str(error).partition("\n")[0]
        raise ConfigError(
            f"the data do not fit the model: {given}: {told}; write another data=, or see its keys "
            "(ZBPP_TRACEBACK=1 shows where)"
        ) from error


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def cut_of(model: Any, num_stages: int) -> dict[str, Any]:
    """How many layers each stage gets, if the model can say."""
    return {"layers_per_stage": model.layer_counts(num_stages)} if hasattr(model, "layer_counts") else {}


def machine(device: torch.device) -> dict[str, Any]:
    """What figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}
