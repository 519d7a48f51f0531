"""What fails on one rank alone is raised on all of them, as one error, and nobody waits for ever."""

import torch
from torch import nn

import zbpp
from helpers.processes import run_ranks
from zbpp.checkpoints import CheckpointError


class Failing:
    """A state that can't be told."""

    def state_dict(self):
        raise RuntimeError("no state today")

    def load_state_dict(self, state):
        raise KeyError("no state")


class Moody(nn.Module):
    """May refuse its state when it is loaded already in part."""

    is_refusing = False

    def forward(self, x):
        return x

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        if self.is_refusing:
            raise RuntimeError("not this one")


def refusals(rank, folder):
    """What each rank is told in each case."""
    stage = nn.Sequential()
    stage.add_module(f"layer_{rank}", nn.Linear(3, 3))
    stage.add_module(f"mood_{rank}", Moody())
    pipeline = zbpp.Pipeline({rank: stage}, zbpp.plan("1f1b", 2, 2), nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    told = []

    def attempt(function, *args, **options):
        try:
            function(folder, pipeline, *args, **options)
            told.append("")
        except CheckpointError as error:
            told.append(str(error))

    attempt(zbpp.save, optimizer if rank else None, step=1)
    attempt(zbpp.save, optimizer, step=1, scheduler=Failing())
    attempt(zbpp.save, 3 if rank else optimizer, step=1)
    attempt(zbpp.save, optimizer, step=1)
    attempt(zbpp.load, None if rank else optimizer)
    attempt(zbpp.load, 3 if rank else optimizer)
    attempt(zbpp.load, optimizer)
    stage[-1].is_refusing = rank == 1
    attempt(zbpp.load, optimizer)
    return told


def test_all_ranks_are_told_of_one_ranks_failure(tmp_path):
    first, second = run_ranks(refusals, 2, str(tmp_path))
    assert first == second
    expected = [
        "some ranks give an optimizer",
        "no state today", "TypeError", "", "some ranks give an optimizer", "TypeError", "",
        "not this one); it is loaded in part",
    ]  # fmt: skip
    for text, part in zip(first, expected, strict=True):
        assert part in text
        assert bool(part) == bool(text)
