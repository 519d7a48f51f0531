"""Where the host waits for the device in an ordinary step, counted by the emulated accelerator."""

import pytest
import torch
from torch import nn

import zbpp
from helpers.processes import run_ranks

M = 4


def waits_of_a_step(rank, device, schedule):
    """The waits of the host within a step of a known size, and within one of a size that is new."""
    from accelerator import reports

    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)))
    timetable = zbpp.plan(schedule, 2, M)
    parts = zbpp.split_sequential(layers, timetable.num_stages)
    stages = {stage: parts[stage].to(device) for stage in timetable.stages_of(rank)}
    with zbpp.Pipeline(stages, timetable, nn.functional.mse_loss) as pipeline:
        for number, size in enumerate((1, 2, 3, 3, 5)):
            if number == 3:
                reports.waits.clear()
            x = torch.ones(M, size, 8, device=device)
            losses = pipeline.step(x, target=x)
        found = [each for each in reports.waits if "/host_links.py" not in each]  # in a thread of its own
    assert len(losses) == M * rank  # of the last stage
    return found


@pytest.mark.parametrize("device, backend", [("cuda", "nccl"), ("npu", "hccl"), ("cuda", "gloo")])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_within_a_step_of_a_known_or_a_new_size_the_host_never_waits_for_the_device(
    schedule, device, backend
):
    assert run_ranks(waits_of_a_step, 2, device, schedule, device=device, backend=backend) == [[], []]


def waits_of_a_library_model(rank, device):
    """The waits of the host within the fourth step of a Hugging Face model, given tokens alone."""
    from accelerator import reports
    from helpers.hf_folders import TOKENS, config_of
    from zbpp.models.hf import HuggingFace

    config = config_of("gemma2", sliding_window=4, head_dim=8).to_dict()
    model, timetable = HuggingFace(config=config), zbpp.plan("interleaved_1f1b", 1, 2, stages_per_rank=2)
    tokens = TOKENS.to(device)
    with zbpp.Pipeline(model, timetable, device=device) as pipeline:
        for _ in range(4):
            reports.waits.clear()
            pipeline.step(tokens, target=tokens)
        return [*reports.waits]


def test_the_host_never_waits_for_a_hugging_face_model_that_is_given_tokens_alone():
    assert run_ranks(waits_of_a_library_model, 1, "cuda", device="cuda") == [[]]
