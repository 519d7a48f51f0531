"""What is refused at a Pipeline's construction, and what its message says to write."""

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
def test_wrapped_stages_trained_with_wrong_gradients():
    for told in run_ranks(wrapped, 2):
        assert len(told) == 4
        for name, text in told.items():
            wrapper = name.partition(", ")[0]
            assert text.startswith(
                f"rank 1: stage 1 is wrapped in {wrapper}, whose reductions expect a plain"
            )
            assert (
                "Give the Pipeline the plain module; to train replicas, average `.grad` after step()" in text
            )


def test_a_module_in_place_of_stages_says_what_to_write():
    with pytest.raises(
        TypeError, match="needs a timetable, no timetable was given: write Pipeline\\(\\{0: mod"
    ):
        Pipeline(model())
    with pytest.raises(ValueError, match=r"stages is a Sequential: write Pipeline\(\{stage index: module\}"):
        Pipeline(model(), plan("zb_h1", 1, 2))
    with pytest.raises(ValueError, match=r"stages is a list: write Pipeline"):
        Pipeline([model()], plan("zb_h1", 1, 2))
    with pytest.raises(ValueError, match=r"stages has '0': Sequential; a key is a stage's index, an int"):
        Pipeline({"0": model()}, plan("zb_h1", 1, 2))
    with pytest.raises(ValueError, match=r"stages has 0: function; .* its value a torch.nn.Module"):
        Pipeline({0: F.relu}, plan("zb_h1", 1, 2))


def test_a_schedules_name_in_place_of_a_timetable():
    """It is planned; without num_microbatches the message says what to add."""
    x = torch.ones(8, 4)
    pipeline = Pipeline({0: model()}, "zb_h1", num_microbatches=4, loss_fn=F.mse_loss)
    assert pipeline.timetable == plan("zb_h1", 1, 4)
    assert len(pipeline.step(x, target=x)) == 4
    with pytest.raises(
        ValueError, match=r'Pipeline\(stages, "zb_h1"\) does not say num_microbatches: add num'
    ):
        Pipeline({0: model()}, "zb_h1")
    with pytest.raises(ValueError, match="num_microbatches=8, but the timetable has 4: leave"):
        Pipeline({0: model()}, plan("zb_h1", 1, 4), num_microbatches=8)
    with pytest.raises(TypeError, match="needs a timetable, got int"):
        Pipeline({0: model()}, 4)


def by_name(rank):
    pipeline = Pipeline({rank: model()}, "1f1b", F.mse_loss, num_microbatches=4)
    return str(pipeline.timetable)


def test_a_name_is_planned_for_the_groups_ranks():
    assert run_ranks(by_name, 2) == [str(plan("1f1b", 2, 4))] * 2
