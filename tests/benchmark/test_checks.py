"""gpu_check.py, cluster_check.py and bench_split.py: their small forms on the CPU. Not run on a GPU."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_split
from cluster_check import driver, rows, training
from gpu_check import local_ranks, main, parts, ranks
from gpu_check.page import Here, Page

from helpers.pages import run_command
from zbpp.job.world import World
from zbpp.parity_check.report import Report

SCRIPTS = Path(__file__).parents[2] / "scripts"


def page_of_gpu_check(folder, names):
    """Each part is fine."""
    options = f"--device cpu --small --out {folder} --seconds 800"
    run_command(f"python {SCRIPTS / 'gpu_check.py'} {' '.join(names)} {options}", folder)
    page = (folder / "page.md").read_text()
    assert [*re.findall(r"^([\w-]+): fine, [\d.]+ s$", page, re.M)] == names
    return page


def test_parts_of_the_gpu_check_fill_its_page_on_a_cpu(tmp_path):
    page_of_gpu_check(tmp_path, ["waits", "offload"])


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_gpu_check_fills_its_page_on_a_cpu(tmp_path):
    """Each part in its small form; ranks compute what one process computes, through host memory."""
    page = page_of_gpu_check(tmp_path, [part.name for part in main.PARTS])
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|(.*)\|$", page, re.M)
    assert all(predicted.strip() for _, predicted, found, _ in rows if "skipped" not in found)
    unlike = [row for row in rows if "unlike" in row[0]]
    assert len(unlike) >= 15
    assert all(row[3].strip() == "ok" for row in unlike)
    assert any("zb_v, random delays" in row[0] for row in unlike)


def do(code):
    """Runs a part that is this Python code."""
    return lambda part: [sys.executable, "-c", code.format(limit=part.limit)]


@pytest.mark.parametrize(
    ("code", "limit", "says"),
    [
        ("print('a row')", 60, "a row\n\na: fine"),
        ("print('a row', flush=True); import os; os.abort()", 60, "a row\n\na: FAILED: ended by SIGABRT"),
        ("print('a row'); raise ValueError('b')", 60, "ValueError: b"),
        (
            "import faulthandler, time; faulthandler.dump_traceback_later({limit} / 5); time.sleep(99)",
            2,
            'File "<string>", line 1 in <module>',
        ),
    ],
)
def test_a_crash_or_a_hang_costs_one_part_and_says_where(tmp_path, code, limit, says):
    part = parts.Part("a", limit)
    is_fine = parts.run_part(part, do(code)(part), tmp_path / "1-a.md")
    text = (tmp_path / "1-a.md").read_text()
    assert says in text
    assert is_fine == ("fine" in text)
    assert ("STOPPED at its limit of 2 s" in text) == (limit == 2)


def test_the_last_parts_are_left_out_and_nothing_erases_another_page(tmp_path):
    both = [parts.Part("a", 60), parts.Part("b", 60)]
    assert parts.run_parts(both, do("print('first')"), tmp_path, title="T", seconds=60) == []
    assert parts.run_parts(both, do("print('second')"), tmp_path, title="T", seconds=5) == ["a", "b"]
    assert parts.run_parts(both[:1], do("print('third')"), tmp_path, title="T", seconds=60) == []
    page = (tmp_path / "page.md").read_text()
    assert re.findall("first|LEFT OUT|third", page) == ["first", "first", "LEFT OUT", "LEFT OUT", "third"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["1-a.md", "2-b.md", "3-a.md", "4-b.md", "5-a.md", "page.md"]


def test_a_part_has_an_environment_of_its_own_and_no_more_time_than_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST", 0.5)
    some = [parts.Part("a", 60, {"A": "of a"}), parts.Part("b", 60), parts.Part("c", 60)]
    code = (
        "import os, time; print(os.environ.get('A'), flush=True); time.sleep(0 if 'A' in os.environ else 99)"
    )
    assert parts.run_parts(some, do(code), tmp_path, title="T", seconds=2) == ["b", "c"]
    found = re.findall(r"of a|None|\w: .*? s$|LEFT OUT", (tmp_path / "page.md").read_text(), re.M)
    assert [each.partition(",")[0] for each in found] == [
        "of a",
        "a: fine",
        "None",
        "b: STOPPED at its limit of 2 s",
        "LEFT OUT",
    ]


DRIVER = """
import sys, time
sys.path.insert(0, {scripts!r})
from pathlib import Path
from gpu_check.parts import Part, end_with_parent, exit_on_sigterm, run_parts
if sys.argv[1] == "part":
    end_with_parent()
    print("a row", flush=True)
    Path({out!r}, "begun").write_text(str(__import__("os").getpid()))
    time.sleep(99)
exit_on_sigterm()
command = lambda part: [sys.executable, {driver!r}, "part"]
run_parts([Part("a", 60), Part("b", 60)], command, Path({out!r}), title="T", seconds=99)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_check_that_is_ended_leaves_nothing_running_and_its_page(tmp_path, number):
    """As `timeout` does it, and torchrun; and by SIGKILL, after which nothing can be written."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(scripts=str(SCRIPTS), out=str(tmp_path), driver=str(script)))
    process = subprocess.Popen([sys.executable, str(script), "driver"], stdout=subprocess.DEVNULL)
    until(lambda: (tmp_path / "begun").exists() and (tmp_path / "begun").read_text())
    process.send_signal(number)
    process.wait(30)
    part = int((tmp_path / "begun").read_text())
    until(lambda: is_gone(part))
    if number == signal.SIGTERM:
        page = (tmp_path / "page.md").read_text()
        assert re.search(r"# T\n\n## a\na row\n\na: STOPPED from outside", page)
        assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "1-a.md").read_text().startswith("## a\na row\n")


def until(is_so, seconds=30.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(pid):
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# What each rank of three does in each part. A part that sleeps writes its number first.
SLEEPS = "import os, time, pathlib; pathlib.Path({out!r}, f'{{os.getpid()}}.pid').touch(); time.sleep(99)"
ON_RANKS = {
    "a": ["print('a row')"] * 3,
    "killed": [SLEEPS, "import os, time; time.sleep(.5); os.kill(os.getpid(), 9)", SLEEPS],
    "b": ["print('b row')"] * 3,
    "hangs": ["print('c row')", "pass", SLEEPS],
    "raises": [SLEEPS, "pass", "raise ValueError('of rank 2')"],
    "d": ["print('d row')"] * 3,
}


def test_a_rank_that_crashes_or_hangs_costs_one_part_of_the_cluster_check(tmp_path, monkeypatch, capfd):
    """The page names the part and the rank, the other parts are there, and nothing is left running."""
    monkeypatch.setattr(driver, "LEAST", 0.0)
    monkeypatch.setattr(driver, "_GRACE", 0.5)
    store = HashStore()

    def run(rank):
        def command(part):
            return [sys.executable, "-c", ON_RANKS[part.name][rank].format(out=str(tmp_path))]

        mine = driver.Driver(store, "check", rank, 3, command, tmp_path)
        return mine.run([parts.Part(name, 3 if name == "hangs" else 60) for name in ON_RANKS], 99)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(run, range(3))] == [1, 0, 0]
    page = (tmp_path / "page.md").read_text()
    assert re.findall("## (.*)", page)[:1] == ["a"]
    assert re.findall(r"(\w+): FAILED (first on .*)", page) == [
        ("killed", "first on rank 1, of 0, 1, 2"),
        ("hangs", "first on rank 2, of 2"),
        ("raises", "first on rank 2, of 0, 2"),
    ]
    for text in (
        "b row",
        "d row",
        "killed: FAILED: ended by SIGKILL",
        "killed: STOPPED: it failed on rank 1",
        "hangs: STOPPED at its limit of 3 s",
        "ValueError: of rank 2",
    ):
        assert text in page
    assert "parts that failed: killed (first on rank 1, of 0, 1, 2), hangs (" in capfd.readouterr().out
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 4
    assert all(map(is_gone, pids))


def test_a_rank_whose_driver_is_gone_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "LEAST", 0.0)
    monkeypatch.setattr(driver, "_SPARE", 0.0)
    alone = driver.Driver(HashStore(), "check", 0, 2, do("print('a row')"), tmp_path)
    assert alone.run([parts.Part("a", 2)], 99) == 1
    page = (tmp_path / "page.md").read_text()
    assert page.endswith("rank 1 says:\n\nnothing: its driver is gone\n\na: FAILED first on rank 1, of 1\n")


def counting(rank, here, first, fails_at):
    """What each rank of a job yields: its number and a count. Rank 1 fails once; rank 0 is later."""
    for number in range(first, 4):
        if rank == 1 and number == fails_at.get("raises"):
            raise ValueError("b")
        if rank == 1 and number == fails_at.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and number == fails_at.get("hangs"):
            time.sleep(99)
        time.sleep(0.2 * (rank == 0))
        yield rank, number


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "rank 1: ValueError: b"),
        ("dies", "rank 1: died, exit code -9"),
        ("hangs", "no rank answered for 3 s"),
    ],
)
def test_a_rank_that_fails_ends_its_job_after_what_was_done(monkeypatch, how, says, capfd):
    monkeypatch.setattr(local_ranks, "patience", lambda here: 3.0 if how == "hangs" else 60.0)
    found = local_ranks.on_ranks(2, counting, Here(torch.device("cpu"), True), 1, {how: 2})
    assert next(found) == [(0, 1), (1, 1)]
    with pytest.raises(RuntimeError, match=says):
        next(found)
    assert not multiprocessing.active_children()
    if how == "hangs":
        assert "in counting" in capfd.readouterr().err


def test_a_case_that_fails_costs_one_row_and_three_in_a_row_the_rest_of_a_job(monkeypatch, capsys):
    lost = {"b", "d", "e", "f"}

    def on_ranks(num_ranks, function, here, size, first):
        for case in names[first:]:
            if case.name in lost:
                raise RuntimeError(f"rank 1: {case.name}")
            yield [ranks.Run([1.0], {"w": "bits"}, 0.0)]

    names = [ranks.Case(name, same_as="a") for name in "abcdefg"]
    monkeypatch.setattr(ranks, "cases", lambda num_ranks, here: iter(names))
    monkeypatch.setattr(ranks, "on_ranks", on_ranks)
    page = Page(Here(torch.device("cpu"), True))
    ranks._job(page, 2, {})
    said = capsys.readouterr().out
    assert re.findall(r"(\w): unlike \| 0 \| 0 \| ok", said) == ["a", "c"]
    assert re.findall("FAILED: RuntimeError: rank 1: (.)", said) == ["b", "d", "e", "f"][: page.num_failed]
    assert page.num_failed == 4
    assert said.endswith("3 cases failed one after the other: the others are left out\n")


def test_a_prediction_stands_in_its_row_before_the_figure_is_measured(capsys):
    page = Page(Here(torch.device("cpu"), True))

    def measured():
        assert capsys.readouterr().out.endswith("| what | 3 ms, why, at most 5 ms | ")
        return 6.0

    page.figure("what", "ms", measured, floor=3.0, why="why", most=5.0)
    page.check("fails", lambda: 1 / 0)
    assert capsys.readouterr().out == (
        "6 ms | MISSED |\n| fails | 0 | FAILED: ZeroDivisionError: division by zero | |\n"
    )
    assert page.num_failed == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["speed"], "part 'speed' does not exist"),
        (["--device", "cpu"], "write --device cpu --small"),
    ],
)
def test_wrong_arguments_of_the_gpu_check_are_one_line(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_on_cpus_fill_the_page_of_the_cluster_check(tmp_path):
    options = f"waits meshes hang --device cpu --small --out {tmp_path}"
    script = SCRIPTS / "cluster_check.py"
    run_command(f"torchrun --standalone --nproc-per-node 2 {script} {options}", tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert re.findall(r"^(\w+): fine, [\d.]+ s$", page, re.M) == ["waits", "meshes", "hang"]
    assert "rank 1 stopped and was named after" in page
    assert (
        page.count("losses, gradients and updates as plain autograd's") == 6
    )  # 2 replicas, 2 shards, 2 tensor-parallel ranks
    assert page.count("does not wait: ") >= 10


def test_a_row_that_raises_is_failed(monkeypatch, capsys):
    with pytest.raises(ValueError, match="the cause"):
        training.summary(Report(1e-11, is_equal=False, verdict="the cause"))
    monkeypatch.setattr(rows, "gather", lambda mine: [mine, "ValueError: b"])
    check = rows.Check(World(0, 2, torch.device("cpu")), rows.Timeouts(), True, Path())
    check.row("x", lambda: "fine", "predicted")
    assert re.search(
        r"\| x \| predicted \| [\d.]+ s \| FAILED: rank 1: ValueError: b \|", capsys.readouterr().out
    )
    assert check.num_failed == 1


def test_the_split_keeps_less_than_f_and_torchs_more_and_w_leaves_nothing(capsys):
    small = ["memory", "--hidden", "64", "--batch", "4", "--time", "64", "--blocks", "2"]
    assert bench_split.main(small) == 0
    said = capsys.readouterr().out
    (line,) = (each.split() for each in said.splitlines() if "after B / after F" in each)
    values = dict(zip(line[6:12:2], map(float, line[7:12:2]), strict=True))
    assert values["zbpp"] <= 0.85 < 1 < values["torch"]
    assert "left after W, bytes" in said
