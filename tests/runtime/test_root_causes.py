"""Where an error comes from: said by the rank that raised it, and by the ranks that it ended."""

import os
import re
import signal
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.host_links import through_host_memory
from helpers.processes import outcomes
from zbpp import Pipeline, plan
from zbpp.runtime import CommunicationError

M, SIZE = 4, 4


def planted(*_):
    raise ValueError("planted")


def in_loss(output, target):
    if in_loss.calls == 2:
        planted()
    in_loss.calls += 1
    return F.mse_loss(output, target)


class FailsInB(nn.Linear):
    """A linear layer whose output's gradient fails in the second microbatch."""

    def forward(self, x):
        self.calls = getattr(self, "calls", -1) + 1
        output = super().forward(x)
        if self.calls == 1:
            output.register_hook(planted)
        return output


def fails_in_w(stage):
    stage.weight.register_post_accumulate_grad_hook(planted)
    return stage


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def steps(rank, stage, loss_fn=F.mse_loss):
    """What this rank's error says, with its notes, and as Python shows it."""
    batch = torch.randn(M, SIZE, generator=torch.Generator().manual_seed(0))  # the same on both ranks
    try:
        with Pipeline({rank: stage}, plan("zb_h1", 2, M), loss_fn, timeout=60.0) as pipeline:
            pipeline.step(batch, target=batch)
            pipeline.step(batch, target=batch)
    except (ValueError, CommunicationError) as error:
        return ["".join(traceback.format_exception(error)), *getattr(error, "__notes__", ())]
    return ["no error"]


def all_steps(rank, answers):
    in_loss.calls = 0
    linear = [nn.Linear(SIZE, SIZE) for _ in range(3)]
    told = {
        "loss": steps(rank, linear[0], in_loss),
        "B": steps(rank, FailsInB(SIZE, SIZE) if rank == 1 else linear[1]),
        "W": steps(rank, fails_in_w(linear[2]) if rank == 1 else linear[2]),
    }
    if rank == 1:
        torch.save(told, answers)
    stage = nn.Linear(SIZE, SIZE)
    if rank == 1:
        stage.register_forward_hook(dies)
    return {**told, "killed": steps(rank, stage)}


@pytest.fixture(scope="module", params=[False, True], ids=["gloo", "through host memory"])
def told(request, tmp_path_factory):
    """By rank and case: what was said."""
    answers = tmp_path_factory.mktemp("told") / "rank-1"
    function, *args = (through_host_memory, all_steps) if request.param else (all_steps,)
    (_, here), (is_alive, _) = outcomes(function, 2, *args, answers)
    assert not is_alive
    return here, torch.load(answers)


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("loss", "in 1F2 (F, the forward, of stage 1, microbatch 2) on rank 1"),
        ("B", "in 1B1 (B, the backward, of stage 1, microbatch 1) on rank 1"),
        ("W", "in 1W0 (W, the weights' gradients, of stage 1, microbatch 0) on rank 1"),
    ],
)
def test_an_error_names_its_action_on_its_rank_and_the_other_rank_what_it_waited_for(told, case, place):
    on_0, on_1 = (each[case] for each in told)
    assert place in on_1
    assert ("in the loss function" in on_1) == (case == "loss")
    assert "CommunicationError: rank 0, instruction " in on_0[0]
    assert re.search(r" (from|to) 1\): ", on_0[0])  # rank 0 may be in a send when the connection closes
