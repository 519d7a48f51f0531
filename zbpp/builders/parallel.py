"""The mesh of a run from its config, and stages split over its tensor dimension."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.config import ParallelConfig, naming
from zbpp.job.agreement import gather
from zbpp.runtime.parallel.mesh import make_mesh, num_pipeline_ranks
from zbpp.runtime.parallel.node_placement import placement_warning
from zbpp.runtime.parallel.tensor_parallel import parallelize


def pipeline_ranks(parallel: ParallelConfig, num_processes: int) -> int:
    """How many ranks each pipeline has. Raises ConfigError if the degrees don't divide `num_processes`."""
    with naming("parallel"):
        return num_pipeline_ranks(num_processes, **_degrees(parallel))


def build_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh | None:
    """The mesh; None if all degrees are 1: then the pipeline stands alone. Collective.

    Rank 0 says in a line if groups that talk much span nodes.
    """
    degrees = _degrees(parallel)
    if set(degrees.values()) == {1}:
        return None
    mesh = make_mesh(**degrees, device_type=device_type)
    warning = placement_warning(gather(socket.gethostname()), degrees)
    if warning and dist.get_rank() == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return mesh


def split_stages(model: Any, stages: Mapping[int, nn.Module], mesh: DeviceMesh | None) -> None:
    """Split the stages over the mesh's tensor dimension. Raises ConfigError if the model can't be split."""
    with naming("model"):
        parallelize(model, stages, mesh)


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    return {"replicate": parallel.replicate, "shard": parallel.shard, "tensor": parallel.tensor}
