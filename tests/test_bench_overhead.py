"""scripts/dev/bench_overhead.py compares what it says it does."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.torch_runtime import needs_a_v
from zbpp import plan

PATH = Path(__file__).parent.parent / "scripts/dev/bench_overhead.py"


@pytest.fixture
def bench(monkeypatch):
    """The script, in a process group of one."""
    spec = importlib.util.spec_from_file_location("bench_overhead", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_overhead", module)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield module
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_v", marks=needs_a_v)])
def test_all_three_do_the_same_forwards_and_backwards(bench, schedule, monkeypatch):
    """Each of them makes the same gradients, up to the mean over microbatches."""
    timetable = plan(schedule, 1, 4)
    found = []
    for make in (bench.plain_step, bench.zbpp_step, bench.torch_step):
        torch.manual_seed(0)
        stages = {stage: nn.Linear(bench.SIZE, bench.SIZE) for stage in range(timetable.num_stages)}
        monkeypatch.setattr(bench, "stages_for", lambda *_, stages=stages: stages)
        make(timetable, 0)()
        found.append([p.grad for stage in stages.values() for p in stage.parameters()])
    for _, ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@needs_a_v
def test_a_runtimes_own_part_is_what_is_left_of_the_whole(bench):
    row = bench.compared(plan("zb_v", 1, 2), rank=0, repeats=2)
    assert row["actions"] == 12
    for name in ("plain", "zbpp", "torch"):
        assert row[f"{name} executor"] == row[f"{name} total"] - row[f"{name} own"]
        assert 0 < row[f"{name} own"] < row[f"{name} total"]
    assert bench.nn.Linear.forward.__name__ == "forward"  # what was counted is as it was
