"""What the benchmark of the split claims apart from speed, on stages small enough for a test."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from zbpp.benchmark.split.counts import products, recompute
from zbpp.benchmark.split.memory import levels
from zbpp.benchmark.split.report import Line
from zbpp.benchmark.split.sections import SECTIONS, available_contestants, measure
from zbpp.benchmark.split.stages import Settings
from zbpp.benchmark.split.timing import SPREAD

DOOR = Path(__file__).parent.parent / "scripts" / "bench_split.py"
SMALL = Settings(hidden=64, batch=4, time=64, blocks=2, tiny=8, depths=(1, 2), rounds=2, compute_rounds=2)


@pytest.fixture(scope="module")
def contestants():
    found, remarks = available_contestants(SMALL)
    assert remarks == []
    return found


@pytest.fixture
def main():
    """The script's function."""
    spec = importlib.util.spec_from_file_location("bench_split", DOOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def lines_of(section, contestants):
    return {line.figure: line for line in SECTIONS[section](contestants, SMALL)}


def test_live_bytes_are_those_of_the_allocator():
    """A MiB made and dropped shows in the highest only; half a MiB that stays until B shows in both."""

    def f():
        large = torch.empty(2**20, dtype=torch.uint8)
        kept.append(torch.empty(2**19, dtype=torch.uint8))
        del large

    kept = []
    found = levels({"F": f, "B": kept.clear}, "cpu")
    assert found["F"] == (2**20 + 2**19, 2**19)
    assert found["B"] == (2**19, 0)


def test_b_leaves_only_what_w_needs_and_w_nothing(contestants):
    lines = lines_of("memory", contestants)
    assert lines["after B / after F"].values["zbpp"] <= 0.85 < 1 < lines["after B / after F"].values["torch"]
    assert lines["left after W, bytes"].values["zbpp"] == 0
    assert all(line.met is not False for line in lines.values())


def test_no_product_is_computed_that_plain_backward_does_not(contestants):
    executed, off = products(contestants, SMALL)
    assert executed.values["zbpp"] == executed.values["plain"] == 2 * (2 * 7) + 2  # and two attentions'
    assert off.values["zbpp"] <= 1e-6


def test_a_checkpointed_block_runs_forward_once(contestants):
    own, torchs = recompute(contestants, SMALL)
    assert own.values["zbpp"] == torchs.values["zbpp"] == own.values["plain"] == 1
    assert own.values["torch"] > 1


@pytest.mark.parametrize("section", ["host", "compute"])
def test_times_are_taken_of_every_phase(contestants, section):
    lines = lines_of(section, contestants)
    assert all(line.values["zbpp"] > 0 for line in lines.values())
    assert any("spread" in figure for figure in lines)
    ratios = [line for figure, line in lines.items() if "/" in figure]
    assert [line.values["plain"] for line in ratios] == [1.0] * (4 if section == "host" else 1)


def test_a_busy_machine_is_told(monkeypatch):
    def section(contestants, settings):
        yield Line(section="host", figure=SPREAD, values={"plain": 0.3, "zbpp": 0.0})

    monkeypatch.setitem(SECTIONS, "host", section)
    _, (remark,) = measure(["host"], SMALL)
    assert remark.startswith("BUSY MACHINE")


def test_a_mark_is_met_or_missed():
    def line(**how):
        return Line(section="", figure="", **how)

    assert line(values={"zbpp": 1.2}, limit=1.15).met is False
    assert line(values={"zbpp": 1.2}, limit=1.15, noise=0.06).met is True
    assert line(values={"zbpp": 1.2}).met is None
    assert line(values={"zbpp": 1.2}, limit=1.15, noise=0.06).mark == "<= 1.15 ± 0.06"


def test_without_torchs_private_functions_its_column_is_left_out_and_said_so(monkeypatch):
    import torch.distributed.pipelining._backward as private

    monkeypatch.delattr(private, "stage_backward_input")
    found, (remark,) = available_contestants(SMALL)
    assert list(found) == ["plain", "zbpp"]
    assert remark.startswith(f"torch {torch.__version__}: its private stage_backward_input can't be used")


def test_the_table_and_the_json_say_the_same(main, tmp_path, capsys):
    path = tmp_path / "split.json"
    threads = torch.get_num_threads()
    try:
        sizes = ["--hidden", "64", "--time", "32", "--blocks", "1"]
        assert main(["products", "recompute", *sizes, "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    table = capsys.readouterr().out.splitlines()
    found = json.loads(path.read_text())
    assert [line["section"] for line in found["lines"]] == ["products"] * 2 + ["recompute"] * 2
    assert [row.split()[0] for row in table[-4:]] == [line["section"] for line in found["lines"]]
    assert all(row.endswith("met") for row in table[-4:])
    assert found["machine"]["torch"] == torch.__version__
    assert torch.__version__ in table[0]


@pytest.mark.parametrize("arguments", [["speed"], ["--rounds", "0"], ["--dtype", "int8"]])
def test_wrong_arguments_are_refused_in_one_line(main, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
