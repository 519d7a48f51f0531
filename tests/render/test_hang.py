"""`zbpp hang` follows who awaited whom, through the records, to the rank that all others waited for."""

import json

import pytest

from zbpp.commands import hang
from zbpp.planning import plan
from zbpp.schedule import to_csv

NOW = 1000.0
TIMETABLE = to_csv(plan("zb_h1", 3, 4))
LOST = "no rank is behind: the ranks await each other, a message is lost"
SILENT = "left no record (its process was killed or stopped, or has not noticed that the job failed)"


def record(process, *notes, rank=None, gave_up=True, why="", processes=(0, 1, 2), job="j", written=NOW):
    """notes: (kind, text, seconds before NOW)."""
    rank = process if rank is None else rank
    return {
        "process": process, "rank": rank, "processes": processes, "num_processes": len(processes), "job": job,
        "timetable": TIMETABLE, "written": written, "why": why, "gave_up": gave_up, "call": "step 3",
        "last": [(kind, text, NOW - before) for kind, text, before in [("call", "step 3", 20.0), *notes]],
        "stack": f"stack of {process}",
    }  # fmt: skip


def at(text, before=5.0):
    return ("at", text, before)


def done(text, before=5.0):
    return ("done", text, before)


def awaits(rank):
    return at(f"Recv x({rank},0) from {rank}")


OUTSIDE = ("outside", "", 5.0)


def shown(folder, capsys, records):
    for each in records:
        (folder / f"flight-rank-{each['process']}.json").write_text(json.dumps(each))
    assert hang.main([str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [record(0, awaits(1)), record(1, awaits(2)), record(2, at("2F0", 6.0), gave_up=False)],
            "rank 2 is behind: at 2F0 of step 3 for 6.0 s: rank 0 awaited rank 1, which awaited rank 2",
        ),
        ([record(0, awaits(1)), record(1, awaits(0))], f"{LOST}: rank 0 awaited rank 1"),
        ([record(0, awaits(1)), record(2, awaits(1))], f"rank 1 {SILENT}: rank 0 awaited rank 1"),
        (
            [record(0, awaits(1), written=NOW + 1), record(1, at("1F0"), why="KeyError: 'x'", gave_up=False)],
            "rank 1 failed: KeyError: 'x'",
        ),
        # A rank that is slow, not stuck, goes on and meets a broken link afterwards.
        (
            [record(0, awaits(1)), record(1, at("1F0"), at("Send g(0,0) to 0", -3.0), written=NOW + 3)],
            "rank 1 is behind: at 1F0 of step 3 for 5.0 s: rank 0 awaited rank 1",
        ),
        # At its end a call awaits all; first those that say nothing, then those that await nobody.
        ([record(0, done("0W3")), record(1, done("1W3"))], f"rank 2 {SILENT}: rank 0 awaited rank 2"),
        (
            [record(0, done("0W3")), record(1, awaits(2)), record(2, at("2F0"), gave_up=False)],
            "rank 2 is behind: at 2F0 of step 3 for 5.0 s: rank 0 awaited rank 2",
        ),
        # In a gather between calls: for the rank that has not come to it.
        (
            [record(0, OUTSIDE), record(1, OUTSIDE), record(2, OUTSIDE, gave_up=False)],
            "rank 2 is behind: between calls, after step 3 for 5.0 s: rank 0 awaited rank 2",
        ),
        ([record(each, OUTSIDE) for each in range(3)], LOST),
        (
            [record(0, ("call", "evaluate after step 3", 4.0)), record(1, at("1F0")), record(2, awaits(1))],
            "rank 1 is behind: at 1F0 of step 3 for 5.0 s: rank 0 awaited rank 1",
        ),
        # Stages of another replica, whose processes have other numbers.
        (
            [
                record(3, at("Release x(1,0) to 1"), rank=0, processes=(3, 5, 7)),
                record(5, at("1B2"), rank=1, processes=(3, 5, 7), gave_up=False),
            ],
            "rank 5 is behind: at 1B2 of step 3 for 5.0 s: rank 3 awaited rank 5",
        ),
        (
            [record(0, awaits(1)), record(1, at("1F0")), record(2, why="an old one", job="i", written=1.0)],
            "rank 1 is behind: at 1F0 of step 3 for 5.0 s: rank 0 awaited rank 1",
        ),
    ],
)
def test_waits_are_followed_to_the_rank_that_waits_for_nobody(tmp_path, capsys, records, said):
    lines = shown(tmp_path, capsys, records).splitlines()
    lines = lines[lines[0].startswith("left out: 1 records of an earlier start") :]
    assert lines[0].endswith(f"  {said}")


def test_each_rank_is_shown_in_a_table_and_on_the_plan_and_the_one_to_blame_with_its_stack(tmp_path, capsys):
    records = [
        record(0, done("0F0"), done("0F1"), done("0F2"), at("Recv g(0,0) from 1")),
        record(1, done("1F0"), at("1F1", 6.0), gave_up=False),
    ]
    out = shown(tmp_path, capsys, records)
    table = [line.split("  ") for line in out.splitlines() if line[:2] in ("0 ", "1 ")]
    assert [[cell.strip() for cell in row if cell.strip()] for row in table] == [
        ["0", "at Recv g(0,0) from 1 of step 3", "5.0 s", "rank 1", "gave up"],
        ["1", "at 1F1 of step 3", "6.0 s", "-", "stood still"],
    ]
    assert "rank 0  0F0 0F1 0F2 [Recv g(0,0) from 1] 0B0 0W0 0F3 " in out
    assert "rank 1  1F0 [1F1] 1B0 1F2 " in out
    assert out.endswith("\nrank 1 was here:\nstack of 1\n")
