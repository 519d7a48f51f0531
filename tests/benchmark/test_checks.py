"""gpu_check.py, cluster_check.py and bench_split.py: their small forms on the CPU. Not run on a GPU."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_split
from cluster_check import rows, training
from gpu_check import main, parts
from gpu_check.page import Here, Page

from helpers.pages import run_command
from zbpp.job.world import World

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_check_fills_its_page_on_a_cpu(tmp_path):
    """Each part in its small form; ranks compute what one process computes, through host memory."""
    options = f"--device cpu --small --out {tmp_path} --seconds 800"
    run_command(f"python {SCRIPTS / 'gpu_check.py'} {options}", tmp_path)
    page = (tmp_path / "page.md").read_text()
    assert [*re.findall(r"^(\w+): fine, [\d.]+ s$", page, re.M)] == [part.name for part in main.PARTS]
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|(.*)\|$", page, re.M)
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
            "import faulthandler, time; faulthandler.dump_traceback_later({limit} - 4); time.sleep(99)",
            5,
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
    assert ("STOPPED at its limit of 5 s" in text) == (limit == 5)


def test_the_last_parts_are_left_out_and_nothing_erases_another_page(tmp_path):
    both = [parts.Part("a", 60), parts.Part("b", 60)]
    assert parts.run_parts(both, do("print('first')"), tmp_path, title="T", seconds=60) == 0
    assert parts.run_parts(both, do("print('second')"), tmp_path, title="T", seconds=5) == 2
    assert parts.run_parts(both[:1], do("print('third')"), tmp_path, title="T", seconds=60) == 0
    page = (tmp_path / "page.md").read_text()
    assert re.findall("first|LEFT OUT|third", page) == ["first", "first", "LEFT OUT", "LEFT OUT", "third"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["1-a.md", "2-b.md", "3-a.md", "4-b.md", "5-a.md", "page.md"]


def test_a_prediction_stands_in_its_row_before_the_figure_is_measured(capsys):
    page = Page(Here(torch.device("cpu"), True, 60.0))

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
    assert page.count("losses as plain autograd's") == 6  # 2 replicas, 2 shards, 2 tensor-parallel ranks
    assert page.count("does not wait: ") >= 10


def test_a_row_that_raises_is_failed(monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"differ from plain autograd's \[1.0\] by 1.0e-10"):
        training.compared([1.0 + 1e-10], [1.0])
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
