"""Which rank the others wait for: said by those that wait, with a record of each rank that runs."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.commands import hang
from zbpp.runtime import CommunicationError
from zbpp.runtime.flight_recorder import Standing, behind

M, SIZE, TIMEOUT = 4, 4, 8.0


def standing(rank, awaits=None, instruction="1F0", *, call="step", number=3, position=5, gave_up=False):
    return Standing(rank, call, number, position, 2, 20, instruction, awaits, 0.0, 0.0, rank, "", gave_up)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ([standing(0, 1), standing(1, 2), standing(2)], 2),
        ([standing(0, 1), standing(1), standing(2, 1)], 1),
        ([standing(0, 1), standing(1, 0)], None),
        # At its end a call awaits whoever has done less.
        ([standing(0, None, "", position=20), standing(1, 2), standing(2, number=2)], 2),
        ([standing(0, 1), standing(1, None, "", call="", number=2)], 1),
        ([standing(0, 1)], None),
        # Between calls, in vain with others in a gather: for the rank that has not come to it.
        ([standing(rank, None, "", call="", gave_up=rank != 2) for rank in range(4)], 2),
        ([standing(0, None, "", call="", gave_up=True), standing(1, 2), standing(2, number=2)], 2),
        ([standing(0, None, "", call="", gave_up=True), standing(1, 0)], None),
    ],
)
def test_waits_are_followed_to_the_rank_that_waits_for_nobody(standings, expected):
    found = behind({each.rank: each for each in standings}, 0)
    assert (found and found.rank) == expected


class Stalls(nn.Linear):
    """A linear layer whose forward stalls once."""

    stall = None

    def forward(self, x):
        stall, self.stall = self.stall, None
        if stall is not None and torch.is_grad_enabled():
            stall()
        return super().forward(x)


def stopped():
    time.sleep(2)  # it tells where it is once a second
    os.kill(os.getpid(), signal.SIGSTOP)


def fails():
    raise ValueError("planted")


def endless_loop(folder):
    while not (folder / "flight-rank-1.json").exists():
        time.sleep(0.01)


def steps(rank, stall, folder):
    """What this rank says of a pipeline whose stage 1 stalls in its second step."""
    stage = Stalls(SIZE, SIZE)
    with Pipeline({rank: stage}, plan("zb_h1", 3, M), F.mse_loss, timeout=TIMEOUT) as pipeline:
        pipeline.leave_records_in(folder)
        batch = torch.randn(M, SIZE)
        pipeline.step(batch, target=batch)
        if rank == 1:
            stage.stall = stall
        try:
            pipeline.step(batch, target=batch)
        except CommunicationError as error:
            return " ".join(getattr(error, "__notes__", []))
        except ValueError as error:
            return str(error)
    return "no error"


def two_stalls(rank, folder):
    pid = folder / "pid"
    if rank == 1:
        pid.write_text(str(os.getpid()))
    said = [steps(rank, stopped, folder / "stopped")]
    if rank == 0:
        os.kill(int(pid.read_text()), signal.SIGCONT)
    said.append(steps(rank, lambda: endless_loop(folder / "loop"), folder / "loop"))
    said.append(steps(rank, fails, folder / "failed"))
    return said


@pytest.mark.slow
def test_a_stopped_rank_and_one_in_an_endless_loop_are_named_with_what_they_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *stalls, failed = zip(*run_ranks(two_stalls, 3, tmp_path), strict=True)
    assert "planted" in failed[1]
    for each in failed[::2]:
        assert each.partition("\n")[0] == "rank 1 failed: ValueError: planted"
    for number, said in enumerate(stalls):
        for rank in (0, 2):
            assert said[rank].startswith("rank 1 is behind: "), said
            place, how = said[rank].splitlines()
            assert re.search(r"at 1F0 for \d+\.\d s, instruction 2 of \d+ of step 2$", place)
            assert f"`zbpp hang {tmp_path}" in how
        is_stopped = (
            re.search(r"silent for \d+\.\d s \(its process is stopped", said[0] + said[2]) is not None
        )
        assert is_stopped == (number == 0), said
    for stale in ("stopped", "failed"):  # an earlier failure of more ranks left these in the same folder
        record = tmp_path / stale / "flight-rank-1.json"
        left = json.loads(record.read_text())
        left["standing"]["told"] = 0
        (tmp_path / "loop" / f"flight-rank-{7 + len(stale)}.json").write_text(json.dumps(left))
    assert hang.main([str(tmp_path / "loop")]) == 0
    said, headline, _, shown = capsys.readouterr().out.split("\n", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  rank 1 is behind: at 1F0 .*", headline)
    assert said == "left out: 2 records of another replica or an earlier failure"
    table = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in table[:4]] == ["rank", "0", "1", "2"]
    assert table[2][1:4] == ["step", "2", "1F0"]
    assert "x(2,0) from 1" in " ".join(table[3])
    assert "rank 1  [1F0] 1F1 " in shown
    assert "in endless_loop" in shown.partition("rank 1, which awaited no other rank, was here:")[2]
    assert hang.main([str(tmp_path / "stopped")]) == 0
    assert "\nrank 1: its process was stopped (SIGSTOP, Ctrl-Z) at 1F0 of step 2" in capsys.readouterr().out
    assert hang.main([str(tmp_path / "failed")]) == 0
    shown = capsys.readouterr().out
    assert "  rank 1 failed: ValueError: planted" in shown.partition("\n")[0]
    shown = shown.partition("\nrank 1 failed here:\n")[2]
    assert 'raise ValueError("planted")' in shown
    assert "\nValueError: planted\n" in shown
    assert shown.endswith("in 1F0 (F, the forward, of stage 1, microbatch 0) on rank 1\n")
    assert "watch.py" not in shown
    assert "failure_record.py" not in shown
    records = [json.loads((tmp_path / f"loop/flight-rank-{rank}.json").read_text()) for rank in range(3)]
    assert "endless_loop" in "".join(records[1]["stack"])
    assert [each["standing"]["call"] for each in records] == ["step"] * 3
    program = [text for number, _, text, _ in records[1]["last"] if number == 1]
    assert len(program) == len(set(program)) > 3 * M
    assert [text for number, _, text, _ in records[1]["last"] if number == 2] == ["Recv x(1,0) from 0", "1F0"]


def test_a_silent_rank_is_behind_whatever_it_awaited_when_it_spoke_last():
    stopped, waiting = standing(1, awaits=0)._replace(told=1.0), standing(0, awaits=1)._replace(told=9.0)
    assert behind({0: waiting, 1: stopped}, 0) is stopped
    assert behind({0: waiting, 1: stopped._replace(told=8.5)}, 0) is None  # they await each other
