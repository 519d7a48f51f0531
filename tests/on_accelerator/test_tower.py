"""The README's first example on an accelerator, as its comment for GPUs says: the CPU's losses."""

import pytest
import torch
from torch import nn

import zbpp
from helpers.processes import run_ranks

SIZE, M, STEPS = 32, 8, 4
ON = [("cuda", "gloo"), ("cuda", "nccl")]


class Tower:
    def build_stage(self, index, num_stages):
        torch.manual_seed(0)
        whole = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(8)))
        return zbpp.split_sequential(whole, num_stages)[index]

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)


def losses_of_a_tower(rank, device, schedule):
    found = []
    with zbpp.Pipeline(Tower(), schedule, num_microbatches=M, device=device) as pipeline:
        assert pipeline.device.type == device
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        for step in range(STEPS):
            torch.manual_seed(step)
            x = torch.randn(64, SIZE).to(device)
            losses = pipeline.step(x, target=x.flip(1))
            optimizer.step()
            optimizer.zero_grad()
            found += [each.item() for each in losses]
    return found


@pytest.mark.parametrize(
    "schedule, device, backend",
    [
        ("zb_h1", *ON[0]),
        ("zb_v", *ON[1]),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("zb_v", *ON[0]), ("zb_h1", *ON[1]))),
    ],
)
def test_a_tower_on_an_accelerator_has_the_losses_of_the_cpu(schedule, device, backend):
    expected = run_ranks(losses_of_a_tower, 2, "cpu", schedule)
    found = run_ranks(losses_of_a_tower, 2, device, schedule, device=device, backend=backend)
    assert found == expected
