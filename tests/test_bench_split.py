"""What scripts/bench_split.py claims apart from speed, on stages small enough for a test."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parent.parent / "scripts" / "bench_split.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_split", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_split"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_split"]


@pytest.fixture(scope="module")
def settings(bench):
    return bench.Settings(
        hidden=64, batch=4, time=64, blocks=2, tiny=8, depths=(1, 2), rounds=2, compute_rounds=2
    )


@pytest.fixture(scope="module")
def rivals(bench, settings):
    found, remarks = bench.contestants(settings)
    assert remarks == []
    return found


def lines_of(bench, section, rivals, settings):
    return {line.figure: line for line in bench.SECTIONS[section](rivals, settings)}


def test_live_bytes_are_those_of_the_allocator(bench):
    """A MiB made and dropped shows in the highest only; half a MiB that stays shows in both."""

    def run(mark):
        with mark("F"):
            large = torch.empty(2**20, dtype=torch.uint8)
            kept.append(torch.empty(2**19, dtype=torch.uint8))
            del large
        with mark("B"):
            kept.clear()

    kept = []
    levels = bench.levels(run, "cpu")
    assert levels["F"] == (2**20 + 2**19, 2**19)
    assert levels["B"] == (2**19, 0)


def test_b_leaves_only_what_w_needs_and_w_nothing(bench, rivals, settings):
    lines = lines_of(bench, "memory", rivals, settings)
    assert lines["after B / after F"].values["zbpp"] <= 0.85 < 1 < lines["after B / after F"].values["torch"]
    assert lines["left after W, bytes"].values["zbpp"] == 0
    assert all(line.met is not False for line in lines.values())


def test_no_product_is_computed_that_plain_backward_does_not(bench, rivals, settings):
    products, off = bench.products(rivals, settings)
    assert products.values["zbpp"] == products.values["plain"] == 2 * (2 * 7) + 2  # and two attentions'
    assert off.values["zbpp"] <= 1e-6


def test_a_checkpointed_block_runs_forward_once(bench, rivals, settings):
    own, torchs = bench.recompute(rivals, settings)
    assert own.values["zbpp"] == torchs.values["zbpp"] == own.values["plain"] == 1
    assert own.values["torch"] > 1


@pytest.mark.parametrize("section", ["host", "compute"])
def test_times_are_taken_of_every_phase(bench, rivals, settings, section):
    lines = lines_of(bench, section, rivals, settings)
    assert all(line.values["zbpp"] > 0 for line in lines.values())
    assert any("spread" in figure for figure in lines)
    ratios = [line for figure, line in lines.items() if "/" in figure]
    assert [line.values["plain"] for line in ratios] == [1.0] * (4 if section == "host" else 1)


def test_a_busy_machine_is_told(bench, settings, monkeypatch):
    def section(rivals, settings):
        yield bench.Line(section="host", figure=bench.SPREAD, values={"plain": 0.3, "zbpp": 0.0})

    monkeypatch.setitem(bench.SECTIONS, "host", section)
    _, (remark,) = bench.measure(["host"], settings)
    assert remark.startswith("BUSY MACHINE")


def test_a_mark_is_met_or_missed(bench):
    def line(**how):
        return bench.Line(section="", figure="", **how)

    assert line(values={"zbpp": 1.2}, limit=1.15).met is False
    assert line(values={"zbpp": 1.2}, limit=1.15, noise=0.06).met is True
    assert line(values={"zbpp": 1.2}).met is None
    assert line(values={"zbpp": 1.2}, limit=1.15, noise=0.06).mark == "<= 1.15 ± 0.06"


def test_without_torchs_private_functions_its_column_is_left_out_and_said_so(bench, settings, monkeypatch):
    import torch.distributed.pipelining._backward as private

    monkeypatch.delattr(private, "stage_backward_input")
    found, (remark,) = bench.contestants(settings)
    assert list(found) == ["plain", "zbpp"]
    assert remark.startswith(f"torch {torch.__version__}: its private stage_backward_input can't be used")


def test_the_table_and_the_json_say_the_same(bench, tmp_path, capsys):
    path = tmp_path / "split.json"
    threads = torch.get_num_threads()
    try:
        sizes = ["--hidden", "64", "--time", "32", "--blocks", "1"]
        assert bench.main(["products", "recompute", *sizes, "--json", str(path)]) == 0
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
def test_wrong_arguments_are_refused_in_one_line(bench, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
