"""Wrapped stages are refused at a Pipeline's construction."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from helpers.processes import run_ranks
from zbpp import Pipeline, plan


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def wrapped(rank):
    """What is said of each wrapper, on a rank whose own stage is a plain one, too."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    inner = model()
    fully_shard(inner[0], mesh=mesh)
    stages = {
        "DistributedDataParallel": DistributedDataParallel(model()),
        "FSDP2 (fully_shard)": fully_shard(model(), mesh=mesh),
        "FSDP2 (fully_shard), a part": inner,
        "FullyShardedDataParallel": FullyShardedDataParallel(model(), device_id=torch.device("cpu")),
    }
    told = {}
    for name, stage in stages.items():
        try:
            Pipeline({rank: stage if rank == 1 else model()}, plan("zb_h1", 2, 2), F.mse_loss)
        except ValueError as error:
            told[name] = str(error)
    return told


@pytest.mark.filterwarnings("ignore")
def test_wrapped_stages_are_refused_on_every_rank():
    for told in run_ranks(wrapped, 2):
        assert len(told) == 4
        for name, text in told.items():
            wrapper = name.partition(", ")[0]
            assert text.startswith(f"rank 1: stage 1 is wrapped in {wrapper}")
            assert "Pipeline(..., mesh=zbpp.make_mesh(" in text
