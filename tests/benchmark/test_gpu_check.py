"""scripts/gpu_check.sh: its small form on the CPU, and what it would say of a GPU. Not run on a GPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zbpp.benchmark.gpu import command_line, gpu_tests, kernels, run
from zbpp.benchmark.gpu.budget import Budget
from zbpp.benchmark.gpu.check import Report
from zbpp.benchmark.gpu.marks import MARKS, Verdict, all_held, verdicts
from zbpp.benchmark.gpu.parts import NAMES, PARTS, TOTAL, PartPlan
from zbpp.benchmark.gpu.report import as_page, as_text
from zbpp.benchmark.gpu.rows import Outcome, Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.interruption import Interrupted, Interruption

ROOT = Path(__file__).parents[2]
SMALL = Settings(device="cpu", is_small=True, seconds=60)


def part_named(name):
    return next(part for part in PARTS if part.name == name)


@pytest.mark.slow
def test_the_small_form_writes_the_same_as_text_json_and_page(tmp_path, capsys):
    arguments = ["--device", "cpu", "--small", "--name", "here", "--out", str(tmp_path)]
    assert command_line.main(arguments) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "gpu_here.json",
        "gpu_here.md",
        "gpu_here.txt",
    ]
    found = json.loads((tmp_path / "gpu_here.json").read_text())
    text, page = (tmp_path / "gpu_here.txt").read_text(), (tmp_path / "gpu_here.md").read_text()
    assert text in capsys.readouterr().out
    assert [part["name"] for part in found["parts"]] == list(NAMES)
    rows = {part["name"]: {row["what"]: row["values"] for row in part["rows"]} for part in found["parts"]}
    for part in found["parts"]:
        assert part["title"] in text
        assert part["title"] in page
        assert not part["why"] or (part["name"], part["why"]) == (
            "graphs",
            "this version of zbpp does not have the part",
        )
        for row in part["rows"]:
            assert row["what"] in text
            assert row["what"] in page
    assert rows["split"]["live bytes after B / after F"]["zbpp"] < 0.85
    assert rows["split"]["live bytes after B / after F"]["torch"] > 1
    assert rows["split"]["compiled: live bytes after B / after F"].keys() == {"compiled", "zbpp"}
    assert rows["schedules"]["losses of all schedules unlike plain's"] == {"zbpp": 0}
    assert rows["schedules"]["zb_v"]["gradients unlike gpipe's"] == 0
    assert rows["offload"]["losses that differ"] == {"all that can": 0}
    assert rows["offload"]["bandwidth with 4 MiB, GiB/s"]["out"] > 0
    counts = {op: rows["kernels"][f"{op} under zb_h1"]["operators"] for op in "FBW"}
    assert 0 < counts["W"] < counts["B"]
    assert rows["kernels"]["BW under gpipe"]["operators"] == counts["B"] + counts["W"]
    assert {each["verdict"] for each in found["marks"]} == {"not measured"}  # this is no GPU


def outcome(name, *rows, why=""):
    return Outcome(name, name.title(), list(rows), why)


def test_a_mark_is_held_or_not_or_not_measured_and_says_why():
    found = [
        outcome(
            "split",
            Row("", {"zbpp": 0.73, "torch": 1.6}, mark="after_b"),
            Row("", {"zbpp": 1.04}, mark="backward", noise=0.02),
        ),
        outcome("graphs", why="stopped after its 75 s"),
        outcome("schedules", Row("", {"zbpp": 0.0}, mark="schedules_equal")),
    ]
    told = {each.mark.name: each for each in verdicts(found, is_real=True)}
    assert told["after_b"].verdict == "held"
    assert told["backward"].verdict == "not held"
    assert (told["graphs_host"].verdict, told["graphs_host"].why) == (
        "not measured",
        "stopped after its 75 s",
    )
    assert told["schedules_equal"].verdict == "held"
    assert not all_held(told.values())
    assert all_held(verdicts(found, is_real=False))
    assert {each.verdict for each in verdicts(found, is_real=False)} == {"not measured"}
    assert {each.why for each in verdicts([], is_real=True)} == {"not asked for"}


def test_a_value_within_its_noise_of_the_limit_is_held():
    row = Row("", {"zbpp": 1.01}, mark="backward", noise=0.02)
    (told,) = [
        each for each in verdicts([outcome("split", row)], is_real=True) if each.mark.name == "backward"
    ]
    assert told.verdict == "held"


def test_of_several_rows_of_a_mark_the_worst_counts():
    def told(*values):
        rows = [Row("", {"graphs": value}, mark="graphs_equal") for value in values]
        return {each.mark.name: each for each in verdicts([outcome("graphs", *rows)], is_real=True)}[
            "graphs_equal"
        ]

    assert (told(0.0, 3.0, 1.0).verdict, told(0.0, 3.0, 1.0).value) == ("not held", 3.0)
    assert told(0.0, 0.0).verdict == "held"
    assert told(float("nan"), 0.0).verdict == "not held"


def test_each_mark_belongs_to_a_part():
    assert {mark.part for mark in MARKS} <= set(NAMES)
    assert sum(part.share for part in PARTS) <= TOTAL


def spend(budget, clock, *used):
    """The seconds that each part gets; used: what each one takes of them, None for all."""
    given = []
    for take in used:
        part, seconds = budget.next()
        given.append((part.name, round(seconds)))
        clock[0] += seconds if take is None else min(take, seconds)
    return given


def budget_of(seconds, *parts):
    clock = [0.0]
    plans = [PartPlan(name, "", "", share, least) for name, share, least in parts]
    return Budget(seconds, plans, lambda: clock[0]), clock


THREE = (("a", 200, 50), ("b", 150, 50), ("c", 100, 50))


def test_a_part_gets_its_share_and_what_others_leave_over():
    assert spend(*budget_of(480, *THREE), None, None, None) == [("a", 220), ("b", 150), ("c", 100)]
    assert spend(*budget_of(480, *THREE), 20, None, None) == [("a", 220), ("b", 350), ("c", 100)]
    assert spend(*budget_of(240, *THREE), None, None, None) == [("a", 110), ("b", 75), ("c", 50)]


def test_a_part_that_would_not_fit_is_skipped():
    budget, clock = budget_of(480, *THREE)
    clock[0] = 425  # 45 s are left: fewer than any of them needs
    assert spend(budget, clock, None, None, None) == [("a", 0), ("b", 0), ("c", 0)]
    budget, clock = budget_of(480, *THREE)
    clock[0] = 360  # 110 s: b and c need 50 each, so a would get 10
    assert spend(budget, clock, None, None, None) == [("a", 0), ("b", 60), ("c", 50)]


def test_a_process_of_its_own_tells_its_rows_and_is_ended_in_time():
    done = run.run_apart(part_named("tests"), SMALL, lambda text: None)
    assert [row.what for row in done.rows] == ["not run: they need a GPU"]
    assert done.why == ""
    stopped = run.run_apart(
        part_named("split"), Settings(device="cpu", is_small=True, seconds=0.3), lambda text: None
    )
    assert (stopped.rows, stopped.why) == ([], "stopped after its 0 s")


def test_a_signal_ends_the_process_of_a_part(monkeypatch):
    signals, started = Interruption(), []

    def signal_comes(process, *_):
        started.append(process)
        signals.take(signal.SIGTERM, None)

    monkeypatch.setattr(run, "_command", lambda *_: ["sleep", "100"])
    monkeypatch.setattr(run, "_wait", signal_comes)
    ended = run.run_apart(part_named("split"), SMALL, lambda text: None, signals)
    assert (ended.rows, ended.why) == ([], "ended by SIGTERM")
    assert started[0].returncode == -signal.SIGKILL


def test_a_signal_that_comes_while_a_process_starts_is_raised_once_it_is_known():
    signals, known = Interruption(), []

    def start():
        with signals.held():
            signals.take(signal.SIGINT, None)
            known.append("a process")

    with pytest.raises(Interrupted, match="SIGINT"):
        start()
    assert known
    signals.take(signal.SIGTERM, None)  # ignored: the check is ending
    assert signals.exit_status == 130


def test_after_a_signal_what_was_measured_is_written(tmp_path, monkeypatch, capsys):
    signals = Interruption()

    def rows(part, settings):
        yield Row("found in time", {"x": 1.0})
        signals.take(signal.SIGTERM, None)

    monkeypatch.setattr(run, "rows_of", rows)
    arguments = ["--device", "cpu", "--small", "--out", str(tmp_path / "out"), "split", "offload", "kernels"]
    assert command_line.main(arguments, signals) == 143
    parts = json.loads((tmp_path / "out/gpu_cpu.json").read_text())["parts"]
    assert [(each["name"], len(each["rows"]), each["why"]) for each in parts] == [
        ("split", 1, "ended by SIGTERM"),
        ("offload", 0, "skipped: SIGTERM ended the check"),
        ("kernels", 0, "skipped: SIGTERM ended the check"),
    ]
    assert "NOT COMPLETE: ended by SIGTERM" in capsys.readouterr().out


def test_the_text_is_printed_where_no_file_can_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "rows_of", lambda part, settings: [Row("found")])
    (tmp_path / "gpu_here.json").mkdir()
    arguments = ["--device", "cpu", "--small", "--name", "here", "--out", str(tmp_path), "split"]
    assert command_line.main(arguments) == 1
    said = capsys.readouterr().out
    assert "found\n" in said
    assert "the files could not be written: [Errno 21] Is a directory" in said


def test_an_error_ends_its_part_only():
    def rows(settings):
        yield Row("before")
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    part = PartPlan("split", "planted_part", "Planted", 1, 1)
    sys.modules["planted_part"] = SimpleNamespace(rows=rows)
    try:
        found = run.run_here(part, SMALL, lambda text: None)
    finally:
        del sys.modules["planted_part"]
    assert [row.what for row in found.rows] == ["before"]
    assert found.why == "RuntimeError: CUDA error: an illegal memory access"


def event(name, start, end, children=()):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), cpu_children=list(children)
    )


def test_launches_are_counted_in_the_action_in_whose_time_they_are():
    """B's are, too, which another thread launches."""
    events = [
        event("0F0", 0, 10),
        event("0B0", 20, 30),
        event("0F1", 40, 50),
        event("0W0", 60, 70),
        *[event("cudaLaunchKernel", start, start) for start in (1, 9, 15, 20, 25, 41)],
        event("cudaMemcpyAsync", 2, 3),
    ]
    assert kernels.counted(events, on_device=True) == {"F": [2, 1], "B": [2], "W": [0]}
    inner = event("aten::mm", 2, 3)
    assert kernels.counted(
        [event("0F0", 0, 10), event("aten::linear", 1, 4, [inner]), inner], on_device=False
    ) == {"F": [1]}


def test_columns_that_no_row_shares_stand_in_tables_of_their_own():
    rows = [Row("a", {"x": 1.0}), Row("b", {"x": 2.0, "y": 3.0}), Row("only text"), Row("c", {"z": 4.0})]
    settings = {"small": False}
    machine = {"device": "D", "torch": "2", "python": "3", "date": "today"}
    report = Report(
        machine, settings, [outcome("split", *rows, why="stopped")], [Verdict(MARKS[0], "held", 0.7)]
    )
    text = as_text(report).splitlines()
    place = text.index("only text")
    assert text[place + 1] == "NOT COMPLETE: stopped"
    assert [line.split() for line in text[place + 2 :]] == [
        ["x", "y"],
        ["a", "1.00", "–"],
        ["b", "2.00", "3.00"],
        [],
        ["z"],
        ["c", "4.00"],
    ]
    assert "| b | 2.00 | 3.00 |  |" in as_page(report)
    assert "| live bytes after B / after F, 1e9 weights in bfloat16 | <= 0.85 | 0.70 | held |  |" in as_page(
        report
    )


def test_the_files_with_gpu_tests_are_found():
    names = {path.name for path in gpu_tests.files_with_gpu_tests(ROOT / "tests")}
    assert {"test_cuda.py", "test_weight_offload.py", "test_offload.py"} <= names
    assert "test_gpu_check.py" not in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "sees no GPU: --device cpu --small tries the check"),
        (["--device", "cpu"], "write --device cpu --small"),
        (["speed"], "part 'speed' does not exist: write some of split, graphs"),
        (["--small", "--device", "cpu", "--minutes", "0"], "--minutes 0: write 0.5 to 120"),
        (["--small", "--device", "cpu", "--name", "a/b"], "--name a/b: write a name for files, without a"),
        (
            ["--small", "--device", "cpu", "--out", f"{__file__}/a"],
            "no file can be written there: [Errno 20]",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_script_says_what_is_missing_before_it_imports_zbpp(tmp_path):
    """A Python that finds no torch: -S and -E leave out the installed packages."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh")],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "has no torch, numpy, rich: install these packages, or set PYTHON=" in done.stderr


def test_the_script_keeps_the_callers_folder(tmp_path):
    """So that --out DIR lies there; without --out the files go into the clone."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = - ] || echo "$PWD: $*"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), "--out", "here"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": "./python"},
        capture_output=True,
        text=True,
    )
    arguments = f"-m zbpp.benchmark.gpu --out {ROOT}/scripts/results --out here"  # the last one counts
    assert done.stdout == f"{tmp_path}: {arguments}\n"
