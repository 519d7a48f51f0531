"""Stages of different ranks compile at once, before the first step: compile_ahead.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.autograd.compiled import compile_stage

M, SIZE = 4, 4


def sequential(num_stages):
    """Stages that change the size of what they pass on."""
    torch.manual_seed(0)
    sizes = [SIZE + index for index in range(num_stages)] + [SIZE]
    return {
        index: nn.Sequential(nn.Linear(sizes[index], 8), nn.Tanh(), nn.Linear(8, sizes[index + 1]))
        for index in range(num_stages)
    }


def two_steps(rank, timetable, eager=()):
    """What was said at each compilation, the losses, and this rank's gradients by stage.

    A rank that begins to compile stage 0 or 1 waits until the other rank compiles the other one: ranks that
    compile one after the other would wait for ever.
    """
    stages = sequential(timetable.num_stages)
    here = {index: stages[index] for index in timetable.stages_of(rank)}
    waits = timetable.num_ranks > 1 and not eager
    said = []

    def say(text):
        said.append(text.split(" in ")[0])
        if waits and text in ("stage 0: compiling", "stage 1: compiling"):
            dist.barrier()

    for index in here.keys() - eager:
        compile_stage(here[index], backend="eager", name=f"stage {index}", say=say)
    batch = torch.linspace(0, 1, M * SIZE).reshape(M, SIZE)
    with Pipeline(here, timetable, F.mse_loss, timeout=60.0) as pipeline:
        losses = [each.item() for _ in range(2) for each in pipeline.step(batch, target=batch)]
    return said, losses, {index: [each.grad for each in stage.parameters()] for index, stage in here.items()}


def test_stages_of_two_ranks_compile_at_once_and_once():
    first, second = run_ranks(two_steps, 2, plan("zb_v", 2, M))
    said, losses, grads = two_steps(0, plan("looped_bfs", 1, M, stages_per_rank=4))
    assert sorted([*first[0], *second[0]]) == sorted(said)
    assert len(said) == 8
    assert [*first[1], *second[1]] == losses
    for index, own in (first[2] | second[2]).items():
        assert all(map(torch.equal, own, grads[index]))


def test_behind_a_stage_that_is_not_compiled_a_stage_compiles_in_its_first_f():
    first, second = run_ranks(two_steps, 2, plan("1f1b", 2, M), (0,))
    assert (first[0], second[0]) == ([], ["stage 1: compiling", "stage 1: compiled"])
