"""scripts/plan.py as its user meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zbpp.schedule import SCHEDULES, Costs, Timetable, plan, render_text, simulate

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan.py"

# A laptop without torch: importing it, or what configures a training run, fails.
LAPTOP = f"""
import runpy, sys
for name in ("torch", "hydra", "omegaconf"):
    sys.modules[name] = None
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def run(*arguments, cwd=None, stdin=None):
    command = [sys.executable, "-c", LAPTOP, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, input=stdin, timeout=60)


def output(*arguments, **options):
    done = run(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refusal(*arguments, **options):
    """The one line on stderr of a run that must fail without a traceback."""
    done = run(*arguments, **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    return done.stderr.strip()


def test_one_schedule_prints_staircase_and_figures():
    text = output("zb_h1", "--ranks", 4, "--microbatches", 8)
    assert text.startswith(render_text(simulate(plan("zb_h1", 4, 8))))
    assert "largest    27       3      11.11 %            4\nmakespan 27 ms\n" in text


def test_costs_by_flag_and_by_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": 3, "b": [1, 2], "comm": 9}))
    text = output("1f1b", "--ranks", 2, "--costs", file, "--comm", 0.5, "--w", "4,5")
    expected = simulate(plan("1f1b", 2, 8), Costs(f=3, b=[1, 2], w=[4, 5], comm=0.5))
    assert f"makespan {expected.makespan:g} ms" in text


def test_compare_all_shows_figures_or_the_reason():
    text = output("--compare", "all", "--ranks", 4, "--microbatches", 6, "--memory-limit", 5)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert list(lines) == ["schedule", *SCHEDULES]
    assert lines["1f1b"].split() == ["1f1b", "1", "27", "27", "9", "33.33", "%", "4"]
    assert lines["gpipe"].endswith("gpipe needs 6 on rank 0, memory_limit allows 5")
    assert "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 7" in lines["zb_h2"]


def test_text_round_trips_through_a_file_and_stdin(tmp_path):
    text = output("zb_v", "--text")
    assert Timetable.parse(text) == plan("zb_v", 4, 8)
    (tmp_path / "mine.txt").write_text(text)
    drawn = output("--timetable", "mine.txt", cwd=tmp_path)
    assert drawn == output("zb_v") == output("--timetable", "-", stdin=text)


def test_program_of_a_rank():
    lines = output("zb_h1", "--ranks", 2, "--microbatches", 2, "--program", 1).splitlines()
    assert lines[:3] == ["Recv x(1,0) from 0", "1F0", "1B0"]


def test_picture_and_trace(tmp_path):
    output(
        "1f1b", "zb_h2", "zb_v", "--picture", "a.png", "--trace", "a.json", "--microbatches", 3, cwd=tmp_path
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(2 * 4))  # zb_h2 needs more microbatches: left out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["zb_h3"],
            f"error: unknown schedule 'zb_h3'; known: {', '.join(SCHEDULES)}; did you mean zb_h2?",
        ),
        (["all", "zb_h3"], "error: unknown schedule 'zb_h3'"),
        (["zb_h2", "--ranks", "8"], "error: zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 15"),
        (["zb_h1", "--ranks", "0"], "error: num_ranks=0: write a whole number, 1 or more"),
        (["zb_h1", "--memory-limit", "3"], "error: zb_h1 needs 4 on rank 0, memory_limit allows 3"),
        (["zb_h1", "--f", "1,2,3"], "error: Costs: f has 3 numbers for 4 stages"),
        (["zb_h1", "--f", "-1"], "error: Costs(f=-1.0"),
        (["zb_h1", "--program", "4"], "error: --program 4: ranks are 0..3"),
        (["1f1b", "zb_h1", "--text"], "error: --text and --program show one schedule; 2 are named"),
        (["--timetable", "missing.txt"], "error: [Errno 2] No such file or directory: 'missing.txt'"),
        (["--timetable", "bad.txt"], "error: line 1, word 2: '0G0' is no action"),
        (["--timetable", "stuck.txt"], "error: the timetable cannot proceed: rank 0 waits in 0W0"),
        (["zb_h1", "--costs", "bad.txt"], "error: bad.txt is no JSON"),
        (["zb_h1", "--costs", "unknown.json"], "error: unknown.json: ['forward'] is no cost"),
        (["zb_h1", "--costs", "list.json"], "error: list.json: [1] is no cost"),
        (["zb_h1", "--trace", "no/such/folder.json"], "error: [Errno 2] No such file or directory"),
    ],
)
def test_errors_are_one_line_and_no_traceback(tmp_path, arguments, message):
    (tmp_path / "bad.txt").write_text("0F0 0G0")
    (tmp_path / "stuck.txt").write_text("0F0 0W0 0B0")
    (tmp_path / "unknown.json").write_text('{"forward": 1}')
    (tmp_path / "list.json").write_text("[1]")
    assert refusal(*arguments, cwd=tmp_path).startswith(message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name at least one schedule, or give --timetable FILE"),
        (["zb_h1", "--timetable", "x"], "name at least one schedule, or give --timetable FILE (not both)"),
        (["zb_h1", "--f", "fast"], "argument --f: 'fast' is neither a number nor a comma list of numbers"),
        (["zb_h1", "--ranks", "four"], "argument --ranks: invalid int value: 'four'"),
        (["zb_h1", "--picture", "a.jpeg"], "'a.jpeg' must end in .png, .pdf or .svg"),
        (["zb_h1", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_usage_says_how(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_examples_that_run(tmp_path):
    text = output("--help")
    examples = re.findall(r"^  plan\.py (.*?)(?: > mine\.txt)?(?:   .*)?$", text, re.MULTILINE)
    assert len(examples) == text.count("  plan.py ") == 7
    (tmp_path / "mine.txt").write_text(output("zb_h1", "--text"))
    for example in examples:
        assert output(*example.split(), cwd=tmp_path)


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} {SCRIPT} zb_h1 --ranks 32 --microbatches 256 --text | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0F0 0F1 0F", "")
