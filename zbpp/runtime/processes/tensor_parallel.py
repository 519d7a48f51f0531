"""Stages whose layers are split over the mesh's dimension "tensor", by the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.processes.dtensors import dimensions_of, is_split
from zbpp.runtime.processes.mesh import TENSOR


def parallelize(model: Any, stages: Mapping[int, nn.Module], mesh: DeviceMesh | None) -> None:
    """Let the model split its stages over the mesh's tensor dimension, if that has more than one process.

    Raises ValueError for a model that has no `parallelize(stage, mesh)`, or one that refuses.
    """
    if mesh is None or TENSOR not in (mesh.mesh_dim_names or ()) or mesh[TENSOR].size() == 1:
        return
    if not hasattr(model, "parallelize"):
        raise ValueError(
            f"{type(model).__name__} has no parallelize(stage, mesh), which splits a stage over the mesh's "
            "tensor dimension: add the method (see zbpp/stage_api.py), or write tensor=1"
        )
    for stage in stages.values():
        model.parallelize(stage, mesh[TENSOR])


def has_split_parameters(stages: Iterable[nn.Module]) -> bool:
    """Whether a parameter of these stages is split over the tensor dimension."""
    parameters = (parameter for stage in stages for parameter in stage.parameters())
    return any(is_split(dimensions_of(each).get(TENSOR)) for each in parameters)
