"""gpu_check.py, cluster_check.py and bench_split.py: their small forms on the CPU. Not run on a GPU."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from zbpp.planning import SCHEDULES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_split
import cluster_check
import gpu_check

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_gpu_check_writes_the_rows_of_its_parts(tmp_path, capsys):
    arguments = ["split", "schedules", "--device", "cpu", "--small", "--out", str(tmp_path)]
    assert gpu_check.main(arguments) == 0
    text = (tmp_path / "gpu_cpu.txt").read_text()
    assert text == capsys.readouterr().out
    assert "after B / after F" in text
    for name in SCHEDULES:
        assert re.search(rf"\n.* {name}: losses unlike plain's +zbpp 0   <= 0 met\n.* unlike 0 +by 0 ", text)
    assert "NOT COMPLETE" not in text


def test_a_limit_that_is_missed_and_a_part_that_raises_are_the_exit_status(tmp_path, monkeypatch, capsys):
    def part(settings, value):
        yield bench_split.Row("a", "b", {"zbpp": value, "plain": 9.0}, limit=0.85)
        if value == 0:
            raise ValueError("c")

    for value, status in ((0.84, 0), (0.86, 1), (float("nan"), 1), (0, 1)):
        monkeypatch.setitem(gpu_check.PARTS, "offload", partial(part, value=value))
        assert gpu_check.main(["offload", "--device", "cpu", "--small", "--out", str(tmp_path)]) == status
    assert capsys.readouterr().out.endswith("NOT COMPLETE: ValueError: c\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["speed"], "part 'speed' does not exist"),
        (["--device", "cpu"], "write --device cpu --small"),
    ],
)
def test_wrong_arguments_of_the_gpu_check_are_one_line(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(arguments)
    assert text in capsys.readouterr().err


def test_two_ranks_on_cpus_fill_the_table_of_the_cluster_check(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["meshes", "hang", "--device", "cpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, str(SCRIPTS / "cluster_check.py"), *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "cluster.txt").read_text()
    assert table == done.stdout
    lines = table.splitlines()
    assert lines[-1] == "none FAILED"
    assert lines[-2].split("s  ")[-1].startswith("rank 1 stopped and was named after")
    equal = [line for line in lines if "losses as plain autograd's" in line]
    assert len(equal) == 6  # with 2 replicas, 2 shards, 2 tensor-parallel ranks


def test_a_row_that_raises_is_failed(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"differ from plain autograd's \[1.0\] by 1.0e-10"):
        cluster_check.compared([1.0 + 1e-10], [1.0])
    monkeypatch.setattr(cluster_check, "gather", lambda mine: [mine, "ValueError: b"])
    table = cluster_check.Table(tmp_path / "a")
    table.row("meshes", "x", lambda: "fine")
    assert "FAILED: rank 1: ValueError: b" in (tmp_path / "a").read_text()


def test_the_split_keeps_less_than_f_and_torchs_more_and_w_leaves_nothing(capsys):
    small = ["memory", "--hidden", "64", "--batch", "4", "--time", "64", "--blocks", "2"]
    assert bench_split.main(small) == 0
    said = capsys.readouterr().out
    (line,) = (each.split() for each in said.splitlines() if "after B / after F" in each)
    values = dict(zip(line[6:12:2], map(float, line[7:12:2]), strict=True))
    assert values["zbpp"] <= 0.85 < 1 < values["torch"]
    assert "left after W, bytes" in said
