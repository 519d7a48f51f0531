"""Models and data from their config nodes, checked; and what there is to say of a model and a machine."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from zbpp.config import ConfigError, build, naming
from zbpp.stage_api import PipelineModel
from zbpp.training.data import Data
from zbpp.training.loader import loaded_data


def build_model(node: dict[str, Any]) -> Any:
    """The model that the node's `_target_` names. Raises ConfigError."""
    model = build("model", node)
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


def cut_of(model: Any, num_stages: int) -> dict[str, Any]:
    """How many layers each stage gets, if the model can say."""
    return {"layers_per_stage": model.layer_counts(num_stages)} if hasattr(model, "layer_counts") else {}


def machine(device: torch.device) -> dict[str, Any]:
    """What figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}
