"""scripts/plan.py as its user meets it."""

import contextlib
import html
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import zbpp.commands.plan
from zbpp.commands.plan.reads import READ
from zbpp.planning import SCHEDULES, RankCosts, canonical_name, plan
from zbpp.planning.answer import Candidate
from zbpp.render import render_cuts, render_text
from zbpp.schedule import Costs, Timetable, from_csv, read_timetable, simulate

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
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, input=stdin, timeout=200)


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
    assert "largest    27       3      11.11 %                 4\nmakespan 27 ms\n" in text


def test_a_flag_wins_over_the_costs_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": 3, "b": [1, 2], "comm": 9}))
    text = output("1f1b", "--ranks", 2, "--costs", file, "--comm", 0.5, "--w", "4,5")
    expected = simulate(plan("1f1b", 2, 8), Costs(f=3, b=[1, 2], w=[4, 5], comm=0.5))
    assert f"makespan {expected.makespan:g} ms" in text


def test_compare_all_shows_figures_or_the_reason():
    arguments = ["--ranks", 4, "--microbatches", 6, "--memory-limit", 5, "--time-limit", 1]
    text = output("--compare", "all", *arguments)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert list(lines) == ["schedule", *SCHEDULES]
    assert lines["1f1b"].split() == ["1f1b", "1", "27.0", "27.0", "9.0", "33.33", "%", "4"]
    assert "  gpipe needs 6 on rank 0, memory_limit allows 5" in lines["gpipe"]
    assert "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 7" in lines["zb_h2"]


def test_text_round_trips_through_a_file_and_stdin(tmp_path):
    text = output("zb_v", "--text")
    assert Timetable.parse(text) == plan("zb_v", 4, 8)
    (tmp_path / "mine.txt").write_text(text)
    drawn = output("--timetable", "mine.txt", cwd=tmp_path)
    assert drawn == output("zb_v") == output("--timetable", "-", stdin=text)


def test_torchs_csv_round_trips_through_a_file(tmp_path):
    text = output("zb_v", "--csv")
    assert from_csv(text) == plan("zb_v", 4, 8)
    (tmp_path / "mine.csv").write_text(text)
    assert output("--timetable", "mine.csv", cwd=tmp_path) == output("zb_v")


def test_choose_ranks_plans_and_draws_them(tmp_path):
    arguments = ["--ranks", 4, "--microbatches", 8, "--memory-limit", 4, "--time-limit", 1]
    text = output("--choose", *arguments, "--html", "a.html", cwd=tmp_path)
    assert "\n4 ranks, 8 microbatches, at most 4 (1.00p) per rank; " in text
    assert "proved  zb_h1 is optimal at 4 (1.00p) with one stage per rank: makespan 27 ms, which" in text
    assert re.search(r"^zb_2p +one +\d", text.partition("needs more memory")[2], re.MULTILINE)
    page = (tmp_path / "a.html").read_text()
    assert all(words in page for words in ("<html", "zb_auto --placement v", "zb_h1 is optimal at 4 (1.00p)"))


@pytest.fixture(scope="module")
def main():
    """The script's own, in this process: a second is saved each time."""
    spec = spec_from_file_location("plan_script", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


CHOOSE = ["--choose", "--ranks", "4", "--microbatches", "8"]
LONG_B = ["--f", "10", "--b", "16", "--w", "8", "--comm", "2"]


def test_choose_opens_with_one_command_where_a_family_is_best(main, capsys):
    assert main([*CHOOSE, "--memory-limit", "4", "--time-limit", "0.2"]) == 0
    title, command, blank, *_ = capsys.readouterr().out.splitlines()
    assert (title, blank) == ("to train with the best plan, zb_v:", "")
    train = "torchrun --standalone --nproc-per-node 4 scripts/train.py"
    assert command == f"  {train} schedule=zb_v num_microbatches=8"


def test_the_installed_command_names_installed_commands(capsys):
    assert zbpp.commands.plan.main([*CHOOSE, "--memory-limit", "4", "--time-limit", "0.2"]) == 0
    assert "\n  zbpp train -n 4 schedule=zb_v num_microbatches=8\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        zbpp.commands.plan.main(["--help"])
    text = capsys.readouterr().out
    assert "\n  zbpp plan zb_h1 --ranks 4 --microbatches 8 " in text
    assert "plan.py" not in text


def test_the_two_commands_for_a_searched_plan_make_a_plan_that_is_as_good(main, capsys, tmp_path):
    """The second one's file is what the first one writes."""
    limit = ["--memory-limit", "5", "--time-limit", "3"]
    assert main([*CHOOSE, *LONG_B, *limit]) == 0
    text = capsys.readouterr().out
    title, first, second, *_ = text.splitlines()
    assert re.fullmatch(r"to train with the best plan, zb_auto --placement \w+:", title)
    script, *arguments, redirect, path = shlex.split(first.removeprefix("  python "))
    assert (script, redirect, path) == ("scripts/plan.py", ">", "plan.txt")
    assert second.endswith("scripts/train.py schedule.timetable=plan.txt num_microbatches=8")
    assert main(arguments) == 0
    (tmp_path / "plan.txt").write_text(capsys.readouterr().out)
    timetable = read_timetable(tmp_path / "plan.txt")
    share = timetable.num_ranks / timetable.num_stages
    costs = Costs(f=10 * share, b=16 * share, w=8 * share, comm=2, saved=share, deferred=share / 2)
    timeline = simulate(timetable, costs)
    best = re.search(r"^zb_auto --placement \w+ +\w+ +([\d.]+)", text, re.MULTILINE)
    assert timeline.makespan <= float(best[1]) * 1.02  # another machine's pace, another plan
    assert max(timeline.peak_memory) <= 5 * (1 + 1e-9)


def test_every_row_of_choose_can_be_typed(main, capsys):
    """Each is a name that plan.py takes, with the makespan that the table says."""
    assert main([*CHOOSE, "--memory-limit", "4", "--time-limit", "0.2"]) == 0
    sections = capsys.readouterr().out.split("\n\n")
    tables = [each for each in sections if re.match("(schedule|needs more memory)  +placement", each)]
    rows = [re.split("  +", line) for table in tables for line in table.splitlines()[1:]]
    assert len(rows) == len(SCHEDULES) - 1 + 3  # zb_auto has three
    for name, _, makespan, *_ in rows:
        assert main([*name.split(), "--ranks", "4", "--microbatches", "8", "--time-limit", "0.2"]) == 0
        said = re.search(r"^makespan (\S+) ms$", capsys.readouterr().out, re.MULTILINE)[1]
        assert float(said) <= float(makespan) or not name.startswith("zb_auto")
        assert name.startswith("zb_auto") or float(said) == float(makespan)


def test_the_page_of_choose_has_its_table_once(main, capsys, tmp_path):
    assert main([*CHOOSE, "--time-limit", "0.2", "--html", str(tmp_path / "a.html")]) == 0
    page = html.unescape((tmp_path / "a.html").read_text())
    text = capsys.readouterr().out
    head, row = next(line for line in text.splitlines() if line.startswith("schedule ")), "zb_h1"
    assert head not in page
    assert page.count('<table class="summary">') == 1
    assert page.count(f'<th scope="row">{row}</th>') == 1
    assert all(f'<th scope="col">{each}</th>' in page for each in re.split("  +", head)[:-1])
    assert page.index("to train with the best plan") < page.index('<table class="summary">')


@pytest.mark.parametrize("given", ["1F1B", "ZB-H1", "ZBVZeroBubble", "Interleaved1F1B"])
def test_names_are_typed_in_any_case_and_in_torchs_spelling(main, capsys, given):
    assert main([given, "--text"]) == 0
    assert Timetable.parse(capsys.readouterr().out) == plan(given, 4, 8)
    assert main([given, "--compare", "gpipe"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == canonical_name(given)


def test_a_memory_limit_has_the_unit_of_the_costs(main, capsys, tmp_path):
    costs = {"saved": 2**30, "deferred": 2**29, "memory_unit": "bytes"}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    arguments = ["zb_h1", "--costs", str(tmp_path / "costs.json"), "--memory-limit"]
    assert main([*arguments, "4GiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +span +bubble +bubble rate +peak memory\nrank 0 .* 4 GiB$", out, re.MULTILINE)
    assert (
        main([*arguments, "3.5GiB"])
        == main([*arguments, "4"])
        == main(["zb_h1", "--memory-limit", "4GiB"])
        == 2
    )
    short, bare, foreign = capsys.readouterr().err.splitlines()
    assert short.startswith("error: zb_h1 needs 4 GiB on rank 0, memory_limit allows 3.5 GiB; this plan")
    assert bare == "error: memory limit '4': the costs are in bytes; write a unit, such as 12GiB"
    assert foreign.startswith("error: memory limit '4GiB': the costs are in activations of one rank's share")


def test_the_output_says_where_the_costs_were_measured(tmp_path):
    """Two stages per rank were measured: for one stage per rank they are joined."""
    about = {"device": "2 CPU cores", "num_ranks": 2, "links": [{"ms": 1}]}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": [1, 2, 3, 4], "b": 2, "w": 1, "about": about}))
    text = output("1f1b", "--ranks", 2, "--costs", file)
    assert text.startswith("costs measured: device 2 CPU cores; num ranks 2\n\n")
    expected = simulate(plan("1f1b", 2, 8), Costs(f=[3, 7], b=2, w=1))
    assert f"makespan {expected.makespan:g} ms" in text


def test_costs_of_two_ranks_for_four_say_what_to_do(main, capsys, tmp_path):
    """It was `Costs: b has 2 numbers for 4 stages`."""
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": 1, "b": [1, 2], "about": {"num_ranks": 2}}))
    assert main(["1f1b", "--costs", str(file), "--ranks", "4"]) == 2
    assert capsys.readouterr().err == (
        f"error: --costs {file}: b has 2 numbers, one per stage, which can't be divided among 4 ranks: write "
        "--ranks 2, or measure with zbpp measure -n 4\n"
    )
    assert main(["1f1b", "--costs", str(file), "-n", "2"]) == 0


def test_a_costs_file_that_is_not_there_is_one_clear_line(main, capsys):
    assert main(["1f1b", "--costs", "nowhere.json"]) == 2
    assert capsys.readouterr().err == (
        "error: --costs nowhere.json: there is no such file; zbpp measure writes one\n"
    )


def test_n_is_short_for_ranks(main, capsys):
    assert main(["1f1b", "-n", "2", "--text"]) == 0
    assert Timetable.parse(capsys.readouterr().out).num_ranks == 2


def test_a_search_takes_placement_objective_and_seed():
    options = {"placement": "v", "objective": "span", "seed": 3, "time_limit": 5.0}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert Timetable.parse(output("zb_auto", *flags, "--text")) == plan("zb_auto", 4, 8, **options)


def test_layers_are_given_by_number_by_costs_and_by_sizes():
    assert output("--layers", 16, "--head", 3.5, "--embedding", 0.1) == (
        render_cuts([1.0] * 16, 4, first=0.1, last=3.5) + "\n"
    )
    assert output("--layers", "1,2,3,4", "--ranks", 2) == render_cuts([1, 2, 3, 4], 2) + "\n"
    sizes = ["--hidden", 64, "--vocab", 4096, "--sequence", 128]
    head = 64 * 4096 / (12 * 64 * 64 + 128 * 64)
    assert output("--layers", 16, *sizes) == render_cuts([1.0] * 16, 4, last=head) + "\n"


def test_layers_are_cut_by_measured_costs(tmp_path):
    about = {"layers_per_stage": [2, 2, 2, 1]}
    stages = {"f": [3, 2, 2, 6], "b": [2, 2, 2, 1], "w": [2, 2, 2, 1]}
    (tmp_path / "costs.json").write_text(json.dumps({**stages, "about": about}))
    text = output("--layers", 7, "--costs", "costs.json", cwd=tmp_path)
    assert text.strip() == render_cuts([3.0] * 7, 4, first=1.0, last=5.0)


def test_a_long_search_shows_a_bar_to_who_looks_and_to_nobody_else():
    """stderr is a terminal here; stdout is not, and holds the timetable alone."""
    ours, theirs = pty.openpty()
    arguments = ["zb_auto", "--placement", "v", "--f", "10", "--b", "16", "--w", "8", "--comm", "2", "--text"]
    arguments += ["--ranks", "8", "--microbatches", "24", "--memory-limit", "10", "--time-limit", "2"]
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown = "".join(read_terminal(ours))
        text = process.stdout.read()
    os.close(ours)
    assert Timetable.parse(text).num_stages == 16
    assert "searching" in shown
    assert "%" in shown


def read_terminal(terminal):
    """What is written to it, until nobody has it open any more."""
    with contextlib.suppress(OSError):
        while True:
            yield os.read(terminal, 4096).decode(errors="replace")


def test_program_prints_what_a_rank_executes():
    lines = output("zb_h1", "--ranks", 2, "--microbatches", 2, "--program", 1).splitlines()
    assert lines[:3] == ["Recv x(1,0) from 0", "1F0", "1B0"]


def test_picture_and_trace_leave_out_a_schedule_that_refuses(tmp_path):
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
        (["1f1b", "zb_h1", "--text"], "error: --text, --csv and --program show one schedule"),
        (["--timetable", "missing.txt"], "error: [Errno 2] No such file or directory: 'missing.txt'"),
        (["--timetable", "bad.txt"], "error: bad.txt: line 1, word 2: '0G0' is no action"),
        (["--timetable", "stuck.txt"], "error: stuck.txt: the timetable cannot proceed: rank 0 waits in 0W0"),
        (["zb_h1", "--costs", "bad.txt"], "error: bad.txt: line 1, column 2 is no JSON"),
        (
            ["zb_h1", "--costs", "unknown.json"],
            "error: unknown.json: 'forward' is no cost; known: f, b, w, bw",
        ),
        (["zb_h1", "--costs", "list.json"], "error: list.json: [1] is no object with any of f, b, w"),
        (["zb_h1", "--costs", "about.json"], "error: about.json: about is 3; an object is expected"),
        (["--timetable", "bad.csv"], "error: bad.csv: line 1, cell 2: '0G0' is no"),
        (
            ["--choose", "--memory-limit", "0.5"],
            "error: memory_limit 0.5 on rank 0 can't hold one microbatch",
        ),
        (
            ["zb_h1", "--microbatches", "1000000000"],
            "error: num_ranks=4, num_microbatches=1,000,000,000: 8,000,000,000 actions take 953 GiB to plan, "
            "8 GiB is the most: write num_microbatches=8388608 or less",
        ),
        (
            ["--choose", "--ranks", "1000000000"],
            "error: num_ranks=1,000,000,000, num_microbatches=8: 16,000,",
        ),
        (["--choose", "--time-limit", "inf"], "error: time_limit=inf: write seconds, 0 or more"),
        (["--choose", "--ranks", "0"], "error: num_ranks=0: write a whole number, 1 or more"),
        (["--choose", "--text", "--time-limit", "0"], "error: --text, --csv and --program show one"),
        (["zb_auto", "--placement", "one", "--time-limit", "-1"], "error: time_limit=-1.0: write seconds"),
        (["zb_h1", "--placement", "v"], "error: zb_h1 places its stages as 'one', not 'v'"),
        (["--layers", "3"], "error: 3 layers are too few for 4 stages: 4 is the least"),
        (
            ["--layers", "8", "--vocab", "9"],
            "error: the head's cost depends on hidden, vocab and sequence: add",
        ),
        (
            ["--layers", "8", "--costs", "costs.json"],
            "error: these costs were measured with layers_per_stage=None",
        ),
        (["zb_h1", "--trace", "no/such/folder.json"], "error: [Errno 2] No such file or directory"),
    ],
)
def test_errors_are_one_line_and_no_traceback(tmp_path, arguments, message):
    (tmp_path / "bad.txt").write_text("0F0 0G0")
    (tmp_path / "stuck.txt").write_text("0F0 0W0 0B0")
    (tmp_path / "unknown.json").write_text('{"forward": 1}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "about.json").write_text('{"about": 3}')
    (tmp_path / "costs.json").write_text('{"f": 3}')
    (tmp_path / "bad.csv").write_text("0F0,0G0")
    assert refusal(*arguments, cwd=tmp_path).startswith(message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name at least one schedule, or give --timetable FILE"),
        (["zb_h1", "--timetable", "x"], "name at least one schedule, or give --timetable FILE (not both)"),
        (["zb_h1", "--f", "fast"], "argument --f: 'fast' is neither a number nor a comma list of numbers"),
        (["zb_h1", "--ranks", "four"], "argument -n/--ranks: invalid int value: 'four'"),
        (["zb_h1", "--picture", "a.jpeg"], "'a.jpeg' must end in .png, .pdf or .svg"),
        (["zb_h1", "--colour"], "unrecognized arguments: --colour"),
        (
            ["--choose", "zb_h1"],
            "name at least one schedule, or give --timetable FILE (not both), --choose, --layers or",
        ),
        (
            ["--layers", "2.5"],
            "argument --layers: '2.5' is no number of layers: write 24, or their costs 1,1,2",
        ),
        (["--layers", "1000000000"], "argument --layers: '1000000000': 4096 layers are the most"),
        (["--layers", "8", "--hidden", "0"], "argument --hidden: '0' is no size: write a whole number, 1 to"),
        (["zb_auto", "--placement", "w"], "argument --placement: invalid choice: 'w'"),
    ],
)
def test_wrong_usage_says_how(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("zb_h1 --out foo.json", "--out doesn't go with SCHEDULE: leave it out; it goes with --cluster"),
        ("zb_h1 --model llama_1b", "--model doesn't go with SCHEDULE: leave it out; it goes with --cluster"),
        ("--choose --top 5", "--top doesn't go with --choose: leave it out; it goes with --cluster"),
        ("--layers 8 --no-recompute", "--no-recompute doesn't go with --layers: leave it out; it goes with"),
        ("zb_h1 --kept 0.05", "--kept doesn't go with SCHEDULE: leave it out; it goes with --choose"),
        (
            "--choose --placement v",
            "--placement doesn't go with --choose: leave it out; it goes with SCHEDULE",
        ),
        (
            "--timetable x --ranks 4",
            "--ranks doesn't go with --timetable: leave it out; it goes with SCHEDULE",
        ),
        ("--layers 8 --f 3", "--f doesn't go with --layers: leave it out; it goes with SCHEDULE and with"),
        (
            "--layers 8 --costs x --head 3",
            "--head doesn't go with --layers --costs: leave it out; it goes with",
        ),
    ],
)
def test_an_option_without_effect_is_refused(main, capsys, arguments, message):
    """Also with its default value, and without a look at files that the command names."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_every_option_is_read_by_some_form():
    names = vars(zbpp.commands.plan.make_parser("").parse_args([])).keys()
    assert set().union(*READ.values()) == names


def test_help_has_examples_that_run(main, capsys, tmp_path, monkeypatch):
    text = output("--help")
    examples = re.findall(r"^  plan\.py (.*?)(?: > mine\.txt)?(?:  .*)?$", text, re.MULTILINE)
    assert len(examples) == text.count("  plan.py ") == 13
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text(str(plan("zb_h1", 4, 8)))
    for example in examples:
        searches = not re.search("--(cluster|timetable|layers)", example)
        limit = " --time-limit 0.2" if searches else ""
        short = re.sub(r"--time-limit \S+", "", example) + limit
        assert main(short.split()) == 0
        assert capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} {SCRIPT} zb_h1 --ranks 32 --microbatches 256 --text | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0F0 0F1 0F", "")


def test_choose_counts_reductions_as_the_schedules_it_names_do(main, capsys):
    """The last W's of a family are ordered for the reductions, in --choose as where it is named."""
    costs = ["--f", "1", "--b", "1.1", "--w", "0.9", "--comm", "0.1", "--reduce", "6"]
    asked = ["--ranks", "4", "--microbatches", "8", *costs]
    assert main(["--choose", *asked, "--time-limit", "0"]) == 0
    text = capsys.readouterr().out
    row = re.search(r"^zb_v +v +([\d.]+)", text, re.MULTILINE)
    assert main(["zb_v", *asked]) == 0
    said = re.search(
        r"^makespan (\S+) ms \(\S+ ms of reductions at its end\)$", capsys.readouterr().out, re.MULTILINE
    )
    assert float(said[1]) == float(row[1])
    per_stage = RankCosts(f=1, b=1.1, w=0.9, comm=0.1, reduce=6).per_stage(8, 4)
    assert float(said[1]) < simulate(plan("zb_v", 4, 8), per_stage).makespan


def test_a_family_that_reductions_change_is_trained_from_a_file():
    costs = Costs(f=1, b=1.1, w=0.9, comm=0.1, reduce=3)
    for reordered, timetable in ((False, plan("zb_v", 4, 8)), (True, plan("zb_v", 4, 8, costs=costs))):
        assert Candidate("zb_v", simulate(timetable, costs)).depends_on_costs == reordered
