"""Stages whose layers are split over the mesh's dimension "tensor", by the model itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.job.agreement import gather
from zbpp.runtime.call import Call, Result
from zbpp.runtime.extra import Observer
from zbpp.runtime.parallel.mesh import TENSOR, dimensions_of, is_split
from zbpp.runtime.rank import Rank


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


class LossesAlike(Observer):
    """Raises ValueError if tensor-parallel processes computed different losses in the first step.

    A loss of a part of an activation differs from process to process, and so do its gradients, which are then
    wrong. Auxiliary losses are compared, too.
    """

    name = "losses_alike"

    def __init__(self) -> None:
        self._is_done = False

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._group = rank.place.groups[TENSOR]

    def end(self, call: Call, result: Result) -> None:
        """Compare the losses of the first step. Collective over the tensor dimension."""
        if not self._is_done and call.kind == "step":
            self._is_done = True
            _check_alike(
                {"the loss": [each.item() for each in result.losses], **result.named.means()}, self._group
            )


def _check_alike(mine: Mapping[str, Sequence[float]], group: dist.ProcessGroup) -> None:
    for other in gather(mine, group):
        for name, values in other.items():
            if not _are_close(values, mine.get(name, [])):
                raise ValueError(
                    f"{name} differs between tensor-parallel processes ({values}, {mine.get(name)}). Either "
                    "they were given different data: give all with the same place.data_part the same. Or the "
                    "loss is computed on a part of an activation, and its gradients are wrong: compute it on "
                    "the whole one, that is, before a colwise layer or after a rowwise one"
                )


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether numbers differ by rounding alone; NaN is close to NaN."""
    if len(some) != len(others):
        return False
    pairs = zip(some, others, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
