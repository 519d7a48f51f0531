"""What goes wrong on one rank ends the step on all of them at once, though the first one lives on.

Every rank reports, then stays until the others have reported, too: nobody is freed by a process's end.
The timeout of the links is far longer than the test's.
"""

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, plan

NUM_RANKS, M, SIZE = 3, 6, 4
PATIENCE = 20.0  # seconds; a step takes milliseconds


def linear():
    return nn.Linear(SIZE, SIZE, dtype=torch.float64)


class Returns(nn.Module):
    """A linear layer whose output is turned into something else."""

    def __init__(self, turn):
        super().__init__()
        self.linear, self.turn, self.calls = linear(), turn, 0

    def forward(self, *args):
        self.calls += 1
        return self.turn(self.linear(args[0]), self.calls)


class Unfit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE + 1, SIZE, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x)


def fail(_, calls):
    raise KeyError(f"planted in call {calls}")


# case -> (rank that is to blame, its stage's module, loss_fn, whether targets are given, what that rank says)
CASES = {
    "an error in forward": (1, lambda: Returns(fail), F.mse_loss, True, "KeyError: 'planted in call 1'"),
    "boundary mismatch": (
        2, Unfit, F.mse_loss, True,
        "BoundaryError: stage 2 failed on what stage 1 returned, (float64[1, 4]): RuntimeError: ",
    ),
    "a shape that changes": (
        1, lambda: Returns(lambda y, calls: y if calls < 3 else torch.cat([y, y])), F.mse_loss, True,
        "ValueError: x(2,2) from rank 1 to rank 2: (float64[2, 4]) is to be sent where (float64[1, 4]) was "
        "sent before: unless the pipeline is made with dynamic_shapes=True",
    ),
    "nothing returned": (
        0, lambda: Returns(lambda y, _: None), F.mse_loss, True,
        "BoundaryError: stage 0 returned NoneType: a stage returns a tensor",
    ),
    "a dict returned": (
        1, lambda: Returns(lambda y, _: {"y": y}), F.mse_loss, True, "BoundaryError: stage 1 returned dict: "
    ),
    "nothing returned at the end": (
        2, lambda: Returns(lambda y, _: None), F.mse_loss, True,
        "BoundaryError: stage 2, the last one, returned nothing",
    ),
    "no scalar loss": (
        2, linear, torch.sub, True, "ValueError: the loss must be a scalar tensor, not (float64[1, 4])"
    ),
    "no target": (2, linear, F.mse_loss, False, "ValueError: the last stage needs target=..."),
}  # fmt: skip


def blamed(rank, name):
    """What each of two steps says on this rank."""
    who, module, loss_fn, has_target, _ = CASES[name]
    timetable = plan("zb_h1", NUM_RANKS, M)
    stage = module() if rank == who else linear()
    pipeline = Pipeline({rank: stage}, timetable, loss_fn, timeout=600.0)
    x = torch.ones(M, SIZE, dtype=torch.float64)
    told = []
    for _ in range(2):
        try:
            pipeline.step(x, target=x if has_target else None)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def all_blamed(rank, folder):
    """By case: what this rank was told, and whether all had been told something while all were alive."""
    found = {}
    for number, name in enumerate(CASES):
        told = blamed(rank, name)
        found[name] = told, wait_for_all(Path(folder), f"case{number}", rank)
    return found


def wait_for_all(folder, word, rank):
    (folder / f"{word}-{rank}").touch()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if len(list(folder.glob(f"{word}-*"))) == NUM_RANKS:
            return True
        time.sleep(0.005)
    return False


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_ranks(all_blamed, NUM_RANKS, str(tmp_path_factory.mktemp("reports")), timeout=100)


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_fails_says_why_and_the_others_stop_with_a_communication_error(name, reports):
    who, *_, expected = CASES[name]
    for rank, report in enumerate(reports):
        (first, second), all_came = report[name]
        assert all_came
        if rank == who:
            assert first.startswith(expected)
        else:
            assert first.startswith(f"CommunicationError: rank {rank}, ")
        assert second.startswith("RuntimeError: an earlier call failed (")
        assert second.endswith("make a new Pipeline")
