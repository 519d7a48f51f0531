"""gpu_check.py, cluster_check.py and bench_split.py: their small forms on the CPU. Not run on a GPU."""

import subprocess
import sys
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
        assert f"\n  {name:<46}  unlike losses 0  unlike gradients 0" in text
    assert "not measured (small form: 0.00)" in text
    assert "NOT COMPLETE" not in text


@pytest.mark.parametrize(
    ("value", "said"), [(0.84, "held: 0.84"), (0.86, "NOT HELD: 0.86"), (float("nan"), "NOT HELD: nan")]
)
def test_a_mark_is_held_below_its_limit(value, said):
    rows = [gpu_check.Row("a", {"zbpp": value, "plain": 9.0}, mark="after_b")]
    found = gpu_check.verdicts(rows, is_real=True)
    assert (found["after_b"], found["backward"]) == (said, "not measured")


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
    options = ["links", "schedules", "meshes", "hang", "--device", "cpu", "--small", "--out", str(tmp_path)]
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
    assert len(equal) == len(SCHEDULES) + 6  # with 2 replicas, 2 shards, 2 tensor-parallel ranks


def test_a_row_that_raises_is_failed_and_a_slow_link_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"differ from plain autograd's \[1.0\] by 1.0e-10"):
        cluster_check.compared([1.0 + 1e-10], [1.0])
    monkeypatch.setattr(cluster_check, "gather", lambda mine: [mine, "ValueError: b"])
    table = cluster_check.Table(tmp_path / "a")
    table.row("links", "x", lambda: "fine")
    assert "FAILED: rank 1: ValueError: b" in (tmp_path / "a").read_text()
    links = [cluster_check.Link((rank, rank + 1), 10.0, 20.0) for rank in range(40)]
    links[7] = links[7]._replace(bandwidth=9.0)
    assert cluster_check.described(links).splitlines()[1:] == [
        "SLOW: 7 <-> 8 has 9.00 GB/s: look at its cable and card"
    ]


def test_the_split_keeps_less_than_f_and_torchs_more_and_w_leaves_nothing(capsys):
    small = ["memory", "--hidden", "64", "--batch", "4", "--time", "64", "--blocks", "2"]
    assert bench_split.main(small) == 0
    said = capsys.readouterr().out
    (line,) = (each.split() for each in said.splitlines() if "after B / after F" in each)
    values = dict(zip(line[6:12:2], map(float, line[7:12:2]), strict=True))
    assert values["zbpp"] <= 0.85 < 1 < values["torch"]
    assert "left after W, bytes" in said
