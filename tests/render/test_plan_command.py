"""`zbpp plan` as its user meets it."""

import contextlib
import itertools
import json
import os
import pty
import re
import shlex
import subprocess
import sys

import pytest

from helpers.pages import ROOT
from zbpp.commands.plan import main
from zbpp.planning import SCHEDULES, RankCosts, balanced_bounds, balanced_shares, plan
from zbpp.render import render_text
from zbpp.schedule import Costs, Timetable, from_csv, read_timetable, simulate

# A laptop without torch: importing it, or what configures a training run, fails.
LAPTOP = """
import sys
for name in ("torch", "hydra", "omegaconf"):
    sys.modules[name] = None
from zbpp.__main__ import main
sys.exit(main(["plan", *sys.argv[1:]]))
"""


@pytest.fixture
def output(capsys):
    """What the command prints, in this process: a second is saved each time."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


def on_a_laptop(*arguments, cwd=ROOT, **options):
    command = [sys.executable, "-c", LAPTOP, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=200, **options)


def test_it_needs_no_torch_and_no_config_library():
    done = on_a_laptop("zb_h1", "--ranks", 4, "--microbatches", 8)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(render_text(simulate(plan("zb_h1", 4, 8))))
    assert "largest    27       3      11.11 %                 4\nmakespan 27 ms\n" in done.stdout


def test_a_flag_wins_over_the_costs_file(output, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": 3, "b": [1, 2], "comm": 9}))
    text = output("1f1b", "--ranks", 2, "--costs", file, "--comm", 0.5, "--w", "4,5")
    expected = simulate(plan("1f1b", 2, 8), Costs(f=3, b=[1, 2], w=[4, 5], comm=0.5))
    assert f"makespan {expected.makespan:g} ms" in text


def test_several_schedules_are_a_table_of_figures_or_reasons(output):
    text = output("all", "--ranks", 4, "--microbatches", 6, "--memory-limit", 5, "--time-limit", 1)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert list(lines) == ["schedule", *SCHEDULES]
    assert lines["1f1b"].split() == ["1f1b", "1", "27.0", "27.0", "9.0", "33.33", "%", "4"]
    assert "  gpipe needs 6 on rank 0, the memory limit allows 5" in lines["gpipe"]
    assert "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 7" in lines["zb_h2"]


@pytest.mark.parametrize(("form", "read"), [("text", Timetable.parse), ("csv", from_csv)])
def test_a_timetable_round_trips_through_a_file(output, tmp_path, form, read):
    text = output("zb_v", f"--{form}")
    assert read(text) == plan("zb_v", 4, 8)
    (tmp_path / f"mine.{form}").write_text(text)
    assert output("--timetable", tmp_path / f"mine.{form}") == output("zb_v")


def test_a_timetable_is_read_from_stdin():
    done = on_a_laptop("--timetable", "-", "--csv", input=str(plan("zb_v", 4, 8)))
    assert from_csv(done.stdout.strip()) == plan("zb_v", 4, 8)


def test_a_program_has_the_messages_of_each_rank(output):
    first, second = output("1f1b", "--ranks", 2, "--microbatches", 1, "--program").strip().split("\n\n")
    assert first.splitlines() == [
        "rank 0", "Post g(0,0) from 1", "0F0", "Send x(1,0) to 1", "Recv g(0,0) from 1", "0BW0", "Reduce 0",
    ]  # fmt: skip
    assert second.splitlines()[1:4] == ["Post x(1,0) from 0", "Recv x(1,0) from 0", "1F0"]


QUADRATIC = {"f": 10, "b": 10, "w": 10, "quadratic": {"f": 6, "b": 15}, "shape": [1, 8192], "past": 0.1}


def test_slices_are_balanced_by_the_costs_or_cut_where_the_user_says(output, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(QUADRATIC))
    costs = RankCosts(f=10, b=10, w=10, quadratic=RankCosts(f=6, b=15, w=0), past=0.1)
    for given, bounds in (
        ("4", balanced_bounds(4, 8192, costs)),
        ("0,4096,7168,8192", [0, 4096, 7168, 8192]),
    ):
        text = output("zb_v", "--ranks", 2, "--microbatches", 2, "--costs", file, "--slices", given)
        timetable = plan("zb_v", 2, 2, num_slices=len(bounds) - 1)
        timeline = simulate(timetable, costs.sliced(bounds).per_stage(4, 2))
        assert f"{len(bounds) - 1} slices, cut at these tokens: {', '.join(map(str, bounds))}" in text
        makespan = float(re.search(r"makespan ([\d.]+) ms", text)[1])
        assert makespan == pytest.approx(timeline.makespan, rel=1e-3)
        assert "F0.0" in text


def test_a_sliced_plan_is_read_back_and_drawn(output, tmp_path):
    text = output("zb_v", "--ranks", 2, "--microbatches", 2, "--slices", 2, "--text")
    assert text.strip() == str(plan("zb_v", 2, 2, num_slices=2))
    (tmp_path / "plan.txt").write_text(text)
    drawn = output("--timetable", tmp_path / "plan.txt", "--html", tmp_path / "page.html")
    assert "makespan 6.25 ms" in drawn
    assert '"slices":2' in (tmp_path / "page.html").read_text().replace(" ", "")


def test_choose_proposes_slices_where_attention_is_known(output, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(QUADRATIC))
    text = output("--choose", "--ranks", 4, "--microbatches", 4, "--costs", file, "--time-limit", 0.1)
    assert text.startswith("the best plan is zb_v --slices 8. To train with it")
    assert "  zbpp train -n 4 schedule=zb_v num_microbatches=4 schedule.slices=8" in text
    assert "1f1b --slices 4" in text


def test_choose_proposes_slices_and_says_why_where_w_is_short(output):
    text = output("--choose", "--f", 10, "--b", 12, "--w", 0.5, "--microbatches", 4, "--time-limit", 0)
    assert re.match(r"the best plan is \w+ --slices 8\.", text)
    assert "W is 2.22 % of the work of F, B and W: delaying it gains next to nothing" in text
    assert "W is" not in output("--choose", "--time-limit", 0)


CHOOSE = ["--choose", "--ranks", "4", "--microbatches", "8"]
LONG_B = ["--f", "10", "--b", "16", "--w", "8", "--comm", "2"]


def test_choose_opens_with_one_command_where_a_family_is_best(output):
    title, command, blank, *_ = output(*CHOOSE, "--memory-limit", 4, "--time-limit", 0.2).splitlines()
    assert title.startswith("the best plan is zb_v. To train with it (add your model=, data=")
    assert blank == ""
    assert command == "  zbpp train -n 4 schedule=zb_v num_microbatches=8"


def test_the_two_commands_for_a_searched_plan_make_a_plan_that_is_as_good(output, tmp_path):
    """The second one's file is what the first one writes."""
    text = output(*CHOOSE, *LONG_B, "--memory-limit", 5, "--time-limit", 3)
    title, first, second, *_ = text.splitlines()
    assert re.match(r"the best plan is zb_auto --placement \w+\.", title)
    zbpp, command, *arguments, redirect, path = shlex.split(first)
    assert (zbpp, command, redirect, path) == ("zbpp", "plan", ">", "plan.txt")
    assert second == "  zbpp train -n 4 schedule.timetable=plan.txt num_microbatches=8"
    (tmp_path / "plan.txt").write_text(output(*arguments))
    timetable = read_timetable(tmp_path / "plan.txt")
    costs = RankCosts(f=10, b=16, w=8, comm=2).per_stage(timetable.num_stages, 4)
    timeline = simulate(timetable, costs)
    best = re.search(r"^zb_auto --placement \w+ +\w+ +([\d.]+)", text, re.MULTILINE)
    assert timeline.makespan <= float(best[1]) * 1.02  # another machine's pace, another plan
    assert max(timeline.peak_memory) <= 5 * (1 + 1e-9)


def test_the_commands_for_a_plan_over_slow_links_have_the_links_and_the_messages_ahead(output, tmp_path):
    links = tmp_path / "links.json"
    links.write_text('{"latency": 30, "busy": 5}')
    _, first, second, *_ = output(*CHOOSE, "--links", links, "--time-limit", 0.2).splitlines()
    assert f"--links {links}" in first
    assert re.search(r" parallel.messages_ahead=[1-9]$", second)


def test_every_row_of_choose_can_be_typed(output):
    """Each is a name that the command takes, with the makespan that the table says."""
    sections = output(*CHOOSE, "--memory-limit", 4, "--time-limit", 0.2).split("\n\n")
    tables = [each for each in sections if re.match("(schedule|needs more memory)  +placement", each)]
    rows = [re.split("  +", line) for table in tables for line in table.splitlines()[1:]]
    assert len(rows) == len(SCHEDULES) - 1 + 3  # zb_auto has three
    for name, _, makespan, *_ in rows:
        text = output(*name.split(), "--ranks", 4, "--microbatches", 8, "--time-limit", 0.2)
        said = re.search(r"^makespan (\S+) ms$", text, re.MULTILINE)[1]
        assert float(said) <= float(makespan) or not name.startswith("zb_auto")
        assert name.startswith("zb_auto") or float(said) == float(makespan)


def test_choose_cuts_layers_for_slow_links(output, tmp_path):
    """A link that takes long is a part of what a cut is judged by, and of its makespan."""
    path = tmp_path / "links.json"
    path.write_text('{"latency": 5, "busy": 0}')
    asked = ["--choose", "--layers", 8, "--speeds", "1,3", "-n", 2, "--microbatches", 16]
    found = []
    for more in ([], ["--links", path]):
        text = output(*asked, *more)
        found.append(float(re.search(r"step / ideal: ([\d.]+)", text)[1]))
    assert 1.0 <= found[0] < found[1]


def test_a_cut_of_layers_that_no_number_of_stages_divides_is_drawn(output, tmp_path):
    """The page took the costs of a layer for those of a stage, and was refused."""
    page = tmp_path / "page.html"
    output("--choose", "--layers", 6, "-n", 4, "--f", "1,2,3,1,1,2", "--html", page)
    assert '"changes":[1' in page.read_text()


def test_links_are_drawn_below_the_ranks(output, tmp_path):
    (tmp_path / "links.json").write_text(
        '{"busy": 0, "latency": 0, "pairs": {"1->0": {"busy": 2, "latency": 1}}}'
    )
    files = ["--html", tmp_path / "page.html", "--picture", tmp_path / "plan.svg"]
    output("1f1b", "--ranks", 2, "--microbatches", 1, "--links", tmp_path / "links.json", *files)
    assert '"links":[[1,0,[["g(0,0)","#c2570c","#fbc592",4,6,7]]]]' in (tmp_path / "page.html").read_text()
    drawn = (tmp_path / "plan.svg").read_text()
    output("1f1b", "--ranks", 2, "--microbatches", 1, *files)
    assert '"links"' not in (tmp_path / "page.html").read_text()
    assert drawn.count("#c2570c") > (tmp_path / "plan.svg").read_text().count("#c2570c")


def test_choose_says_how_many_layers_each_stage_should_have(output, tmp_path):
    """The speeds are 1 : 3, so an even cut takes twice the time of one that gives a rank a quarter."""
    asked = ["--choose", "--layers", 8, "--speeds", "1,3", "-n", 2, "--microbatches", 16]
    text = output(*asked)
    pattern = r"cut for ranks of speed 1, 3: ([\d,]+) layers per stage, schedule=(\w+) \("
    counts, name = re.match(pattern, text).groups()
    assert sum(map(int, counts.split(","))) == 8
    even, best = (float(re.search(rf"{words} ([\d.]+)", text)[1]) for words in ("even cut:", "step / ideal:"))
    assert even >= 2
    assert best < 1.1
    run = "num_microbatches=16 model.layers_per_stage=auto parallel.speeds=[1,3]"
    assert text.endswith(f"zbpp train -n 2 schedule={name} {run}\n")
    # With links, which layers_per_stage=auto doesn't know, the command has the cut.
    (tmp_path / "far.json").write_text('{"pairs": {"0<->1": {"latency": 60, "busy": 5}}}')
    text = output(*asked, "--f", 80, "--b", 80, "--w", 80, "--links", tmp_path / "far.json")
    assert f" model.layers_per_stage=[{re.match(pattern, text)[1]}] " in f"{text.splitlines()[-1]} "
    assert "W is 4.76 % of the work" in output(*asked, "--f", 9, "--b", 11, "--w", 1)
    narrow = output(*asked, "--memory-limit", "2,1.5")
    limited = float(re.search(r"step / ideal: ([\d.]+)", narrow)[1])
    assert best < limited  # the fast rank holds less than its part


def test_a_memory_limit_has_the_unit_of_the_costs(output, capsys, tmp_path):
    costs = {"saved": 2**30, "deferred": 2**29, "memory_unit": "bytes"}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    arguments = ["zb_h1", "--costs", str(tmp_path / "costs.json"), "--memory-limit"]
    table = output(*arguments, "4GiB")
    assert re.search(r"^ +span +bubble +bubble rate +peak memory\nrank 0 .* 4 GiB$", table, re.MULTILINE)
    assert main([*arguments, "3.5GiB"]) == main(["zb_h1", "--memory-limit", "4GiB"]) == 2
    short, foreign = capsys.readouterr().err.splitlines()
    assert short.startswith("error: zb_h1 needs 4 GiB on rank 0, the memory limit allows 3.5 GiB; this plan")
    assert foreign.startswith("error: memory limit '4GiB': the costs are in activations of one rank's share")


def test_the_output_says_where_the_costs_were_measured(output, tmp_path):
    """Two stages per rank were measured: for one stage per rank they are joined."""
    about = {"device": "2 CPU cores", "num_ranks": 2, "load_average": 12.21533203125, "links": [{"ms": 1}]}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": [1, 2, 3, 4], "b": 2, "w": 1, "about": about}))
    text = output("1f1b", "--ranks", 2, "--costs", file)
    assert text.startswith("costs measured: device 2 CPU cores; num ranks 2; load average 12.22\n\n")
    expected = simulate(plan("1f1b", 2, 8), Costs(f=[3, 7], b=2, w=1))
    assert f"makespan {expected.makespan:g} ms" in text


def test_a_search_takes_placement_and_time(output):
    options = {"placement": "v", "time_limit": 5.0}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert Timetable.parse(output("zb_auto", *flags, "--text")) == plan("zb_auto", 4, 8, **options)


def test_a_long_search_shows_a_bar_to_who_looks():
    """stderr is a terminal here; stdout is not, and holds the timetable alone."""
    ours, theirs = pty.openpty()
    arguments = ["zb_auto", "--placement", "v", *LONG_B, "--text"]
    arguments += ["--ranks", "8", "--microbatches", "24", "--memory-limit", "10", "--time-limit", "2"]
    command = [sys.executable, "-m", "zbpp", "plan", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, cwd=ROOT) as process:
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


def test_links_say_which_one_the_step_waits_for(output, tmp_path):
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"latency": 0, "pairs": {"1->2": {"latency": 4}, "2->3": {"latency": 3}}}))
    says = "The step waits most for the link 1 -> 2: it takes 19 ms, and 15 ms with that link at full speed."
    one = ("--ranks", 4, "--microbatches", 1, "--links", file)
    assert says in output("1f1b", *one)
    assert f"1f1b: {says}" in output("1f1b", "gpipe", *one)


def test_choose_with_links_says_what_half_the_bytes_and_more_memory_would_buy(output, tmp_path):
    """One microbatch: two F, two B and a W of 1, and x and g, each of which takes 2 + 4."""
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"latency": 0, "busy": 0, "pairs": {"0<->1": {"latency": 2, "busy": 4}}}))
    one = ("--choose", "--ranks", 2, "--microbatches", 1, "--links", file, "--time-limit", 0.1)
    rows = [line.split() for line in output(*one, "--memory-limit", 4).split("\n\n")[-1].splitlines()]
    assert rows[0] == ["the", "best", "plan", "with", "makespan", "bound", "schedule"]
    assert [(" ".join(row[:-3]), float(row[-3])) for row in rows[1:]] == [
        ("as asked", 5 + 2 * (2 + 4)),
        ("half the bytes", 5 + 2 * (2 + 2)),
        ("1.5 x the memory", 5 + 2 * (2 + 4)),
        ("2 x the memory", 5 + 2 * (2 + 4)),
    ]
    assert "x the memory" not in output(*one)


def test_a_picture_leaves_out_a_schedule_that_refuses(output, tmp_path):
    names = ["1f1b", "zb_h2", "zb_v"]  # zb_h2 needs more microbatches
    text = output(*names, "--picture", tmp_path / "a.png", "--microbatches", 3)
    assert text.rstrip().endswith(f"wrote {tmp_path / 'a.png'}")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


FILES = {
    "bad.txt": "0F0 0G0",
    "bad.csv": "0F0,0G0",
    "stuck.txt": "0F0 0W0 0B0",
    "unknown.json": '{"forward": 1}',
    "two.json": '{"f": 1, "b": [1, 2], "about": {"num_ranks": 2}}',
}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("zbh1", f"unknown schedule 'zbh1'; known: {', '.join(SCHEDULES)}; did you mean zb_h1?"),
        ("zb_h3", f"unknown schedule 'zb_h3'; known: {', '.join(SCHEDULES)}; did you mean zb_h2?"),
        ("zb_h2 --ranks 8", "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 15"),
        ("zb_h1 --ranks 0", "num_ranks=0: write a whole number, 1 or more"),
        ("zb_h1 --memory-limit 3", "zb_h1 needs 4 on rank 0, the memory limit allows 3"),
        ("zb_h1 --f 1,2,3", "Costs: f has 3 numbers for 4 stages"),
        ("zb_h1 --f -1", "Costs(f=-1.0"),
        ("1f1b zb_h1 --text", "--text, --csv and --program show one schedule"),
        ("--timetable missing.txt", "--timetable missing.txt: there is no such file; zbpp plan NAME --text"),
        ("--timetable bad.txt", "bad.txt: line 1, word 2: '0G0' is no action"),
        ("--timetable bad.csv", "bad.csv: line 1, cell 2: '0G0' is no"),
        ("--timetable stuck.txt", "stuck.txt: the timetable cannot proceed: rank 0 waits in 0W0"),
        ("zb_h1 --costs bad.txt", "bad.txt: line 1, column 2 is no JSON"),
        ("zb_h1 --costs unknown.json", "unknown.json: 'forward' is no cost; known: f, b, w, bw"),
        ("1f1b --costs nowhere.json", "--costs nowhere.json: there is no such file; zbpp measure writes one"),
        ("1f1b --costs two.json", "--costs two.json: b has 2 numbers, one per stage, which can't be divided"),
        ("--choose --memory-limit 0.5", "the memory limit 0.5 on rank 0 can't hold one microbatch"),
        ("zb_h1 --placement v", "zb_h1 places its stages as 'one', not 'v'"),
        ("zb_h1 --html no/such/folder.html", "no/such/folder.html: No such file or directory"),
        ("--choose --layers 8 --speeds 1,2", "--speeds has 2 numbers for 4 ranks: write one for each"),
        ("--choose --layers 8 --speeds 1,1,1,0", "speeds=[1.0, 1.0, 1.0, 0.0]: write a number above 0"),
        ("--choose --layers 8 --f 1,2,3", "f has 3 numbers for 8 layers: write one for each"),
        (
            "--choose --layers 3",
            "1f1b, zb_h1, interleaved_zb, zb_v, v_half, v_min can't run 3 layers on 4 ranks",
        ),
        (
            "--choose --layers 8 --memory-limit 0.1",
            "1f1b with [1, 1, 2, 4] layers per stage, the least, needs",
        ),
        ("zb_1p --slices 2", "zb_1p has no slices, and num_slices=2"),
        (
            "zb_h1 --slices 2,4",
            "--slices 2,4: write how many, as 8; or where slices begin, from 0 on, and the",
        ),
        ("zb_h1 --slices 2.5", "--slices 2.5: write how many, as 8; or where slices begin"),
        ("zb_h1 --slices 0", "--slices 0: write how many, as 8; or where slices begin"),
        ("zb_h1 --slices nan", "--slices nan: write how many, as 8; or where slices begin"),
        (
            "zb_h1 --slices 0,4,4",
            "--slices=[0.0, 4.0, 4.0]: slice 1, [4.0, 4.0), has no tokens: let the bounds ascend",
        ),
        (
            "--choose --slices 0,4,8",
            "--slices 0,4,8: --choose balances slices; write their numbers, as 1,2,4",
        ),
    ],
)
def test_errors_are_one_line_and_no_traceback(tmp_path, monkeypatch, capsys, arguments, message):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "name at least one schedule, or give one of --choose, --timetable and --cluster"),
        ("zb_h1 --timetable x", "name at least one schedule, or give one of"),
        ("zb_h1 --f fast", "argument --f: 'fast' is neither a number nor a comma list of numbers"),
        ("zb_h1 --picture a.jpeg", "argument --picture: 'a.jpeg' must end in .png, .pdf or .svg"),
        ("zb_h1 --colour", "unrecognized arguments: --colour"),
        ("zb_h1 --rank 4", "unrecognized arguments: --rank 4"),
        ("zb_h1 --model llama_1b", "--model doesn't go with SCHEDULE; it goes with --cluster"),
        ("--choose --placement v", "--placement doesn't go with --choose; it goes with SCHEDULE"),
        ("--choose --lengths x", "--lengths doesn't go with --choose; it goes with SCHEDULE"),
        (
            "zb_h1 --lengths x --text",
            "--text doesn't go with --lengths: the timetable is the same",
        ),
        (
            "--choose --speeds 1,1,2,2",
            "--speeds chooses how many layers each rank gets: add --layers 32, say",
        ),
        ("--choose --text", "--text doesn't go with --choose; it goes with SCHEDULE and with --timetable"),
        ("--timetable x --ranks 4", "--ranks doesn't go with --timetable; it goes with SCHEDULE"),
        ("--cluster a100 --memory-limit 3GiB", "--memory-limit doesn't go with --cluster; it goes with"),
    ],
)
def test_wrong_usage_says_how(capsys, arguments, message):
    """An option without effect is refused, also with its default value."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_help_has_examples_that_run(output, capsys, tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    examples = re.findall(r"^  zbpp plan (.*?)(?: > mine\.txt)?(?:  .*)?$", text, re.MULTILINE)
    assert len(examples) == text.count("  zbpp plan ") == 12
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text(str(plan("zb_h1", 4, 8)))
    (tmp_path / "tokens.txt").write_text("300\n120\n\n900\n0\n")
    for example in examples:
        limit = "" if re.search("--(cluster|timetable)", example) else " --time-limit 0.2"
        assert output(*(re.sub(r"--time-limit \S+", "", example) + limit).split())


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m zbpp plan zb_h1 --ranks 32 --microbatches 256 --text | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0F0 0F1 0F", "")


# ---------------------------------------------------------------- --lengths


def test_lengths_draw_the_step_in_two_orders_and_say_what_order_and_slices_bring(output, tmp_path):
    """Two ranks, f = b = w = 1 at the mean length 2."""
    (tmp_path / "tokens.txt").write_text("6\n1\n0\n1\n")
    costs, timetable = Costs.of_lengths([3, 0.5, 0, 0.5], Costs()), plan("zb_h1", 2, 4)
    text = output("zb_h1", "--ranks", 2, "--lengths", tmp_path / "tokens.txt", "--html", tmp_path / "p.html")
    orders = itertools.permutations(range(4))
    least = min(simulate(timetable, costs.reordered(order)).makespan for order in orders)
    given = simulate(timetable, costs)
    found = [int(each) for each in re.search(r"the order: ([\d ]+)", text)[1].split()]
    best = simulate(timetable, costs.reordered(found))
    assert best.makespan == least
    for says in (
        render_text(given),
        render_text(best),
        f"zb_h1: {given.makespan:g} ms in the given order, {least:g} ms in the best order found",
        "the busiest rank works 12 ms in any order",
        f"would bring at most {least - 12:g} ms more",
        "the longest microbatch alone takes 12 ms",
    ):
        assert says in text
    page = (tmp_path / "p.html").read_text()
    assert "zb_h1, given order" in page
    assert "zb_h1, best order" in page


def test_lengths_with_several_schedules_and_a_quadratic_part_are_a_table(output, tmp_path):
    lengths, measured = tmp_path / "tokens.json", tmp_path / "costs.json"
    lengths.write_text("[500, 100, 100, 300]")
    measured.write_text('{"f": 7.5, "b": 7.5, "w": 7.5, "quadratic": {"f": 2.5, "b": 5}}')
    text = output("1f1b", "zb_v", "--ranks", 2, "--lengths", lengths, "--costs", measured)
    costs = Costs.of_lengths([2, 0.4, 0.4, 1.2], Costs(f=7.5, b=7.5, w=7.5), Costs(f=2.5, b=5, w=0))
    given = simulate(plan("1f1b", 2, 4), costs).makespan
    assert re.search(rf"^1f1b, given order +1 +{given:.5g}", text, re.MULTILINE)
    assert "zb_v, best order" in text
    assert text.count("in the best order found") == 2


def test_lengths_say_what_slices_bring_and_more_lengths_than_microbatches_are_packed(output, tmp_path):
    """The longest first, to the shortest group: 9+1, 5+3+2, and 4+3+3."""
    lengths, costs_file = tmp_path / "tokens.txt", tmp_path / "costs.json"
    lengths.write_text("3\n9\n5\n1\n4\n3\n2\n3\n")
    costs_file.write_text('{"f": 7.5, "b": 7.5, "w": 7.5, "quadratic": {"f": 2.5, "b": 5}}')
    how = ["zb_h1", "--ranks", 2, "--microbatches", 3, "--lengths", lengths, "--costs", costs_file]
    text = output(*how)
    assert "8 sequences packed into 3 microbatches of 10 to 10 tokens; the longest sequence has 9" in text
    costs = Costs.of_lengths([1, 1, 1], Costs(f=7.5, b=7.5, w=7.5), Costs(f=2.5, b=5, w=0))
    for number in (2, 4, 8):
        own = costs.sliced(balanced_shares(number, costs))
        makespan = simulate(plan("zb_h1", 2, 3, num_slices=number), own).makespan
        assert f"{number} slices {makespan:.5g} ms" in text


def test_measured_costs_know_the_length_that_they_hold_for(output, tmp_path):
    """Two rows of 100 tokens; the mean length of the file is another."""
    lengths, measured = tmp_path / "tokens.json", tmp_path / "costs.json"
    lengths.write_text("[500, 100, 100, 300]")
    measured.write_text('{"f": 7.5, "b": 7.5, "w": 7.5, "quadratic": {"f": 2.5, "b": 5}, "shape": [2, 100]}')
    text = output("1f1b", "--ranks", 2, "--lengths", lengths, "--costs", measured)
    costs = Costs.of_lengths([2.5, 0.5, 0.5, 1.5], Costs(f=7.5, b=7.5, w=7.5), Costs(f=2.5, b=5, w=0))
    given = simulate(plan("1f1b", 2, 4), costs).makespan
    assert f"1f1b: {given:.5g} ms in the given order" in text


@pytest.mark.parametrize(
    "text, more, message",
    [
        ("1\n-2\n", [], "length -2.0 of microbatch 1: write a number of 0 or more"),
        ("1\nx\n", [], "line 2: 'x' is no number"),
        ("nan", [], "length nan of microbatch 0"),
        ("[1, [2]]", [], "length [2] of microbatch 1"),
        ("[1, 2", [], "no JSON that can be read"),
        ("", [], "write one number per microbatch"),
        ("0\n0\n", [], "all lengths are 0"),
        ("1\n2\n", ["--microbatches", "3"], "2 lengths for --microbatches 3"),
        ("[1, 2]", ["--memory-limit", "0.1"], "memory limit allows 0.1"),
    ],
)
def test_a_file_of_lengths_that_can_not_be_used_is_one_line(capsys, tmp_path, text, more, message):
    (tmp_path / "tokens").write_text(text)
    assert main(["zb_h1", "--ranks", "2", "--lengths", str(tmp_path / "tokens"), *more]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]
