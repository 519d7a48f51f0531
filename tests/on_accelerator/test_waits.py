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


@pytest.mark.parametrize(
    "device, backend",
    [("cuda", "nccl"), pytest.param("npu", "hccl", marks=pytest.mark.nightly), ("cuda", "gloo")],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_within_a_step_of_a_known_or_a_new_size_the_host_never_waits_for_the_device(
    schedule, device, backend
):
    assert run_ranks(waits_of_a_step, 2, device, schedule, device=device, backend=backend) == [[], []]


def waits_of_a_library_model(rank, device):
    """{what the model is given: the host waits in its fourth step, how far losses are from the CPU's}"""
    from accelerator import reports
    from helpers.hf_folders import TOKENS, config_of
    from zbpp.models.hf import HuggingFace

    config, (rows, time) = config_of("gemma2", sliding_window=4, head_dim=8).to_dict(), TOKENS.shape
    timetable = zbpp.plan("interleaved_1f1b", 1, 2, stages_per_rank=2)
    padded = torch.ones_like(TOKENS)
    padded[0, :3] = padded[-1, -2:] = 0
    half = torch.arange(time // 2)
    cases = {
        "tokens alone": {},
        "padding": {"attention_mask": padded},
        "a mask of ones": {"attention_mask": torch.ones_like(TOKENS)},
        "documents": {"position_ids": torch.cat([half, half]).expand(rows, -1).contiguous()},
    }
    found = {}
    for name, given in cases.items():
        losses = {}
        for place in ("cpu", device):
            moved = {key: value.to(place) for key, value in given.items()}
            tokens, model = TOKENS.to(place), HuggingFace(config=config)
            with zbpp.Pipeline(model, timetable, device=place) as pipeline:
                for _ in range(4):
                    reports.waits.clear()
                    losses[place] = pipeline.step(tokens, target=tokens, **moved)
                waits = [*reports.waits]
        on_cpu, on_device = (torch.stack(each).cpu() for each in losses.values())
        found[name] = waits, float((on_cpu - on_device).abs().max())
    return found


def test_the_host_never_waits_for_a_hugging_face_model():
    (found,) = run_ranks(waits_of_a_library_model, 1, "cuda", device="cuda")
    assert {name: waits for name, (waits, _) in found.items()} == {name: [] for name in found}
    assert max(difference for _, difference in found.values()) < 1e-5
