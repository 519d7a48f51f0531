"""Rows and tables of a benchmark whose figures are given."""

import json
from dataclasses import replace

import pytest

from zbpp import Costs, plan, simulate
from zbpp.benchmark import report
from zbpp.benchmark.interleaved_timing import TimedRunner
from zbpp.benchmark.report import rows_of, speed_comparisons, table, write
from zbpp.render.style import headline

MIB = 2**20


def timed_runner(name, runtime, wall_times, peaks=(3 * MIB, 2 * MIB), **options):
    timetable = plan(name, 2, 4)
    lines = [simulate(timetable, Costs(f=wall, b=wall, w=wall)) for wall in wall_times]
    if "failure" in options:
        return TimedRunner(name, runtime, timetable, **options)
    return TimedRunner(
        name,
        runtime,
        timetable,
        runner=object(),
        peak_bytes=list(peaks),
        wall_times=wall_times,
        timelines=lines,
        **options,
    )


@pytest.fixture
def timed():
    return [
        timed_runner("1f1b", "zbpp", [30.0, 20.0, 10.0]),
        timed_runner("1f1b", "torch", [24.0]),
        timed_runner("zb_v", "zbpp", [16.0]),
        timed_runner("zb_v", "torch", [], failure="RuntimeError: no"),
    ]


def test_a_row_has_the_median_and_what_the_costs_predict(timed):
    row = rows_of(timed, items_per_batch=100)[0]
    assert (row["schedule"], row["runtime"], row["stages_per_rank"]) == ("1f1b", "zbpp", 1)
    assert row["step_ms"] == 20
    assert row["tokens_per_second"] == 5000
    # Costs are medians over the turns: F = B = W = 20 ms; (m + p - 1) of them, three each
    assert row["predicted_makespan_ms"] == pytest.approx(5 * 60)
    assert row["makespan_ms"] == row["predicted_makespan_ms"]  # as the picture's headline says
    assert f"makespan {row['makespan_ms']:g} ms" in headline(timed[0].typical)
    assert row["ratio"] == pytest.approx(1)
    assert row["measured_bubble_rate"] == pytest.approx(row["predicted_bubble_rate"]) == pytest.approx(0.2)
    assert row["peak_memory_bytes"] == [3 * MIB, 2 * MIB]


def test_the_table_is_aligned_and_a_failure_has_its_reason_in_place_of_figures(timed):
    lines = table(rows_of(timed, 100)).splitlines()
    assert lines[0].split()[:5] == ["schedule", "runtime", "stages/rank", "step", "makespan"]
    assert lines[1].split() == [
        "1f1b", "zbpp", "1", "20.0", "300.0", "300.0", "1.000", "0.200", "0.200", "3.0", "MiB", "5000",
    ]  # fmt: skip
    assert lines[4].split()[:5] == ["torch", "2", "-", "-", "-"]
    assert lines[4].endswith("  RuntimeError: no")
    assert len(lines) == 5
    assert len({line.index("torch" if "torch" in line else "zbpp") for line in lines[1:5]}) == 1


def test_speeds_are_compared_like_with_like_and_best_with_best(timed):
    assert speed_comparisons(rows_of(timed, 100)) == [
        "zbpp's speed over torch's, same schedule: 1f1b 1.200x",
        "zbpp's best (zb_v) over torch's best (1f1b): 1.500x",
        "zbpp's best in the 3.0 MiB of torch's 1f1b (zb_v) over torch's 1f1b: 1.500x",
        "zbpp's best in the 3.0 MiB of torch's 1f1b (zb_v) over torch's best (1f1b, 3.0 MiB): 1.500x",
    ]


def test_what_is_written_is_json_a_picture_and_a_trace(timed, tmp_path):
    rows = rows_of(timed, 100)
    write(tmp_path, {"model": "Mlp"}, timed, rows)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["about"], found["rows"], found["verdicts"]) == (
        {"model": "Mlp"},
        rows,
        speed_comparisons(rows),
    )
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    names = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {
        f"{who}: measured rank {rank}"
        for who in ("1f1b, zbpp", "1f1b, torch", "zb_v, zbpp")
        for rank in (0, 1)
    }


def test_emulated_stages_have_no_memory_and_no_verdict_on_it(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "render_picture", lambda panels, path: drawn.extend(panels))
    found = [
        timed_runner("1f1b", "zbpp", [20.0], peaks=()),
        timed_runner("1f1b", "torch", [24.0], peaks=()),
        timed_runner("zb_v", "torch", [], failure="RuntimeError: no"),
    ]
    found[0].timelines = [replace(each, peak_memory=(3e8, 4e8), measured=True) for each in found[0].timelines]
    rows = rows_of(found, 100)
    lines = table(rows).splitlines()
    assert lines[0].split()[-3:] == ["predicted", "bubble", "tokens/s"]
    assert lines[1].split() == [
        "1f1b", "zbpp", "1", "20.0", "300.0", "300.0", "1.000", "0.200", "0.200", "5000",
    ]  # fmt: skip
    assert lines[3].split()[:9] == ["torch", "2", *"-------"]
    assert [each for each in speed_comparisons(rows) if "fits" in each or "in the" in each] == []
    write(tmp_path, {}, found, rows)
    assert "peak" not in headline(drawn[0][1])


def test_a_panel_shows_the_peak_of_its_own_runner_not_that_of_the_process(timed, tmp_path, monkeypatch):
    """All panels of bench.png said the same 350 MiB: all runners take their turns in the same processes."""
    drawn = []
    monkeypatch.setattr(report, "render_picture", lambda panels, path: drawn.extend(panels))
    timed[0].timelines = [replace(each, peak_memory=(3e8, 4e8), measured=True) for each in timed[0].timelines]
    write(tmp_path, {}, timed, rows_of(timed, 1))
    titles, timelines = zip(*drawn, strict=True)
    assert titles == ("1f1b, zbpp: measured", "1f1b, torch: measured", "zb_v, zbpp: measured")
    assert timelines[0].peak_memory == (3 * MIB, 2 * MIB)
    assert "peak memory 3 MiB (rank 0)" in headline(timelines[0])
