"""`zbpp hang` shows a stopped rank where it stood, not where it came to after it was let run."""

import json

import pytest

from zbpp.commands import hang
from zbpp.planning import plan
from zbpp.runtime.flight_recorder import FlightRecorder
from zbpp.schedule import lower, to_csv

TIMETABLE = plan("zb_h1", 2, 4)
PROGRAM = list(lower(TIMETABLE)[1].instructions)
PLACE = next(number for number, each in enumerate(PROGRAM) if str(each) == "1F3")
DAY = 86400.0


@pytest.fixture
def clock(monkeypatch):
    """The seconds since the epoch that recorders see."""
    now = [DAY]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0] - DAY)
    return now


def run_until(recorder, clock, number):
    """A step, up to the instruction with this number; each takes 10 ms."""
    recorder.enter("step")
    note = recorder.begin(PROGRAM)
    for _ in PROGRAM[: number + 1]:
        clock[0] += 0.01
        note(clock[0] - DAY)
    return note


def shown(folder, capsys, stopped, told, blamed_at, later):
    """What `zbpp hang` prints. told: the last word of rank 1; later: its record."""
    common = {"pipeline": "", "timetable": to_csv(TIMETABLE), "stack": ["  line of code\n"], "why": ""}
    blaming = FlightRecorder(0).record()
    blaming["standing"] |= {"told": blamed_at, "since": blamed_at - 5}
    others = [{**told, "state": "stopped"}] if stopped else []
    records = [
        {**common, **blaming, "said": "rank 1 is behind", "others": others},
        {**common, **later, "said": "", "others": []},
    ]
    for rank, record in enumerate(records):
        (folder / f"flight-rank-{rank}.json").write_text(json.dumps(record))
    assert hang.main([str(folder)]) == 0
    return capsys.readouterr().out


def test_a_rank_stopped_in_an_action_is_shown_there_and_its_later_place_is_named(tmp_path, capsys, clock):
    recorder = FlightRecorder(1)
    told = recorder.standing()._asdict()  # before the first step: up to a second older than the stop
    run_until(recorder, clock, len(PROGRAM) - 1)
    recorder.num_steps = 1
    recorder.leave()
    note = run_until(recorder, clock, PLACE)
    stop = clock[0]
    clock[0] = blamed_at = stop + 5  # SIGCONT comes after this: the rank runs on
    for _ in range(2):
        clock[0] += 0.01
        note(clock[0] - DAY)
    later = recorder.record()
    out = shown(tmp_path, capsys, True, told, blamed_at, later)
    assert (
        "rank 1: its process was stopped (SIGSTOP, Ctrl-Z) at 1F3 of step 2; it was let run again, so that "
        f"the job could end, and was last at {PROGRAM[PLACE + 2]} of step 2\n"
    ) in out
    assert [line.split()[1:6] for line in out.splitlines() if line.startswith("1 ")] == [
        ["step", "2", "1F3", "5.0", "s"]
    ]
    assert " 1F2 1B2 1W1 [1F3] 1B3 " in out
    assert "rank 1, once it was let run, came here:" in out
    # A rank that nobody saw stopped is shown where its record was written.
    out = shown(tmp_path, capsys, False, told, blamed_at, later)
    assert "stopped" not in out
    assert f"[{PROGRAM[PLACE + 2]}]" in out


def test_a_rank_stopped_behind_a_step_is_shown_behind_it(tmp_path, capsys, clock):
    """The end of a step is not recorded: the drawing says so, unless the rank itself told it."""
    recorder = FlightRecorder(1)
    told = recorder.standing()._asdict()
    run_until(recorder, clock, len(PROGRAM) - 1)
    recorder.num_steps = 1
    clock[0] += 0.01
    recorder.leave()
    between = recorder.standing()._asdict()
    blamed_at = clock[0] + 5
    clock[0] = blamed_at + 0.1
    run_until(recorder, clock, 0)
    later = recorder.record()
    last = PROGRAM[-1]
    assert f"at {last} of step 1, or after it; it was let" in shown(
        tmp_path, capsys, True, told, blamed_at, later
    )
    out = shown(tmp_path, capsys, True, between, blamed_at, later)
    assert "its process was stopped (SIGSTOP, Ctrl-Z) between calls, after step 1; it was let run" in out
    assert "[outside, after step 1]" in out


def test_a_step_that_raises_after_the_stop_keeps_its_number(tmp_path, capsys, clock):
    recorder = FlightRecorder(1)
    told = recorder.standing()._asdict()
    run_until(recorder, clock, PLACE)
    blamed_at = clock[0] + 5
    recorder.leave()  # the step failed: it is not counted
    clock[0] = blamed_at + 0.1
    out = shown(tmp_path, capsys, True, told, blamed_at, recorder.record())
    assert "at 1F3 of step 1, or after it; it was let run again" in out
    assert "and was last between calls, before step 1" in out
