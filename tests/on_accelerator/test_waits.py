"""Where the host waits for the device in an ordinary step, counted by the emulated accelerator."""

import pytest
import torch
from torch import nn

import zbpp
from helpers.processes import run_ranks

M = 4


def waits_of_a_step(rank, device, schedule):
    """The waits of the host within the fourth step."""
    from accelerator import reports

    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)))
    timetable = zbpp.plan(schedule, 2, M)
    parts = zbpp.split_sequential(layers, timetable.num_stages)
    stages = {stage: parts[stage].to(device) for stage in timetable.stages_of(rank)}
    x = torch.ones(M, 1, 8, device=device)
    with zbpp.Pipeline(stages, timetable, nn.functional.mse_loss) as pipeline:
        for _ in range(3):
            pipeline.step(x, target=x)
        reports.waits.clear()
        losses = pipeline.step(x, target=x)
        found = [each for each in reports.waits if "/host_links.py" not in each]  # in a thread of its own
    assert len(losses) == M * rank  # of the last stage
    return found


@pytest.mark.parametrize("device, backend", [("cuda", "nccl"), ("npu", "hccl"), ("cuda", "gloo")])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_within_an_ordinary_step_the_host_never_waits_for_the_device(schedule, device, backend):
    assert run_ranks(waits_of_a_step, 2, device, schedule, device=device, backend=backend) == [[], []]
