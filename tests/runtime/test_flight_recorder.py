"""Each rank's record of its last instructions, and the thread that looks whether the rank goes on."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import outcomes, run_ranks
from zbpp import Pipeline, plan
from zbpp.commands import hang
from zbpp.observers import flight_recorder
from zbpp.observers.flight_recorder import FlightRecorder
from zbpp.runtime import CommunicationError
from zbpp.runtime.call.feed import Call
from zbpp.schedule import Action, Op

M, SIZE, TIMEOUT = 4, 4, 3.0
F0, STEP = Action(0, Op.F, 0), Call((), None, {})


def rank_of(num_ranks=2, timeout=60.0, is_nccl=False):
    """What a recorder asks of its rank."""
    place = SimpleNamespace(broadcast=lambda key: key, groups={}, pipeline=None)
    return SimpleNamespace(
        index=0,
        key="j",
        place=place,
        timetable=plan("zb_h1", num_ranks, M),
        wait_limit=timeout,
        receives_on_device=is_nccl,
        num_steps=0,
        is_alone=num_ranks == 1,
        source_of_sizes=1,
    )


def recorder(folder, **options):
    made = FlightRecorder(folder)
    made.attach(rank_of(**options))
    return made


def record_in(folder, rank=0):
    return json.loads((folder / f"flight-rank-{rank}.json").read_text())


def test_an_instruction_gives_what_it_gave_and_is_noted_before_and_after(tmp_path):
    flight, given = recorder(tmp_path), (torch.ones(1),)
    run = flight.around("step", F0, lambda message: (flight.newest[:2], message))
    flight.announce(SimpleNamespace(call=STEP))
    flight.begin(STEP)
    assert run(given) == (("at", F0), given)
    assert flight.newest[:2] == ("done", F0)
    flight.end(STEP, None)
    before = time.time()
    flight.fail(ValueError("planted"))
    record = record_in(tmp_path)
    assert [each[:2] for each in record["last"][1:]] == [
        ["call", "step 1"], ["at", "Recv sizes from 1"], ["done", "Recv sizes"],
        ["at", "0F0"], ["done", "0F0"], ["outside", ""],
    ]  # fmt: skip
    assert all(before - 60 < moment <= record["written"] for *_, moment in record["last"])
    assert (record["why"], record["gave_up"]) == ("ValueError: planted", False)


def test_a_rank_for_which_nobody_waits_writes_nothing(tmp_path):
    flight = recorder(tmp_path, num_ranks=1)
    flight.fail(ValueError("planted"))
    assert not [*tmp_path.iterdir()]


def test_the_record_is_written_before_torchs_watchdog_ends_a_process_on_nccl(tmp_path):
    """The watchdog does at the timeout; on gloo ranks give up at the timeout, and the record comes behind."""
    assert recorder(tmp_path, timeout=600.0, is_nccl=True).patience == 300.0
    assert recorder(tmp_path, timeout=600.0).patience > 600.0


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_that_is_busy_between_calls_has_a_record_until_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "_INTERVAL", 0.01)
    monkeypatch.setattr(flight_recorder, "_GRACE", 0.0)
    flight, path = recorder(tmp_path, timeout=0.1), tmp_path / "flight-rank-0.json"
    wait_until(lambda: path.exists() and path.read_text().endswith("}"))
    assert "most recent call first" in record_in(tmp_path)["stack"]
    for _ in range(3):
        flight.announce(SimpleNamespace(call=STEP))
        time.sleep(0.01)
    wait_until(lambda: not path.exists())
    flight.close()


# ---------------------------------------------------------------- three ranks


class Stalls(nn.Linear):
    """A linear layer whose forward stalls once."""

    stall = None

    def forward(self, x):
        stall, self.stall = self.stall, None
        if stall is not None:
            stall()
        return super().forward(x)


def fails():
    raise ValueError("planted")


def endless_loop(folder):
    while len([*folder.glob("flight-rank-*.json")]) < 3:
        time.sleep(0.01)


def lose_a_message():
    """The next message that this rank sends never arrives."""
    from zbpp.runtime.links import Outbox

    start = Outbox._start

    class Sent:
        def wait(self):
            """It seems to have been received."""

    def lost(self, tensor):
        Outbox._start = start
        self._num_sent += 1
        return Sent(), tensor

    Outbox._start = lost


def steps(rank, stall, folder, timeout):
    """What this rank says of a pipeline whose stage 1 stalls in its second step."""
    stage, extras = Stalls(SIZE, SIZE), [FlightRecorder(folder)]
    timetable = plan("zb_h1", 3, M)
    with Pipeline({rank: stage}, timetable, F.mse_loss, timeout=timeout, extras=extras) as pipeline:
        batch = torch.randn(M, SIZE)
        pipeline.step(batch, target=batch)
        if rank == 1:
            stage.stall = stall
        try:
            pipeline.step(batch, target=batch)
        except (CommunicationError, ValueError) as error:
            return [str(error), *getattr(error, "__notes__", [])]
    return ["no error"]


def three_stalls(rank, folder):
    return [
        steps(rank, fails, folder / "failed", 60.0),
        steps(rank, lambda: endless_loop(folder / "loop"), folder / "loop", TIMEOUT),
        steps(rank, lose_a_message, folder / "lost", TIMEOUT),
    ]


def shown(folder, capsys):
    assert hang.main([str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_rank_that_the_others_waited_for_is_found_from_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run_ranks(three_stalls, 3, tmp_path)
    assert told[1][0][0] == "planted"
    for rank in (0, 2):
        for said, name in zip(told[rank], ("failed", "loop", "lost"), strict=True):
            assert f"rank {rank}, instruction " in said[0]
            hint = f"in step 2: `zbpp hang {tmp_path / name}` shows which rank the others waited for"
            assert said[-1] == hint
    headline, *lines = shown(tmp_path / "failed", capsys).splitlines()
    assert headline.endswith("  rank 1 failed: ValueError: planted")
    assert lines[-1].endswith("in 1F0 (F, the forward, of stage 1, microbatch 0) on rank 1")
    headline, *lines = shown(tmp_path / "loop", capsys).splitlines()
    assert "rank 1 is behind: at 1F0 of step 2 for " in headline
    assert headline.endswith(("rank 0 awaited rank 1", "rank 2 awaited rank 1"))
    (row,) = [line.split() for line in lines if line.startswith("1 ")]
    assert row[1:5] == ["at", "1F0", "of", "step"]
    assert "rank 1  [1F0] 1F1 " in "\n".join(lines)
    assert "in endless_loop" in "\n".join(lines).partition("rank 1 was here:")[2]
    headline = shown(tmp_path / "lost", capsys).splitlines()[0]
    assert "no rank is behind: the ranks await each other, a message is lost: rank " in headline


def one_is_gone(rank, folder, how):
    return steps(rank, lambda: os.kill(os.getpid(), how), folder, TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_a_rank_without_a_record_is_the_one_that_was_killed_or_stopped(tmp_path, capsys, how):
    (_, first), _, (_, last) = outcomes(one_is_gone, 3, tmp_path, how, timeout=8)
    assert "(Recv " in first[0] + last[0]
    assert " left no record (its process was killed or stopped" in shown(tmp_path, capsys).splitlines()[0]
    assert "rank 1 left no record" in shown(tmp_path, capsys)
    assert not (tmp_path / "flight-rank-1.json").exists()
