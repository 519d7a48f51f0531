"""zb_auto: the paper's planner to four digits, proved targets reached, never above a family or a limit."""

import json
from pathlib import Path

import pytest

from zbpp.planning import plan
from zbpp.schedule import Costs, simulate

DATA = Path(__file__).parent.parent / "reference"
PAPER = json.loads((DATA / "zb_paper_table.json").read_text())
TARGETS = json.loads((DATA / "zb_targets.json").read_text())
ROWS = [dict(zip(PAPER["columns"], row, strict=True)) for row in PAPER["rows"]]


def costs_of(row):
    return Costs(f=row["F"], b=row["B"], w=row["W"], comm=row["comm"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['m']}")
def test_zb_1p_and_zb_2p_have_the_papers_bubbles(row):
    for column, factor in (("zb_1p", 1), ("zb_2p", 2)):
        limit = factor * row["p"]
        found = plan(column, row["p"], row["m"], costs=costs_of(row))
        timeline = simulate(found, costs_of(row))
        assert round(timeline.bubble_rate, 4) == row[column]
        assert max(timeline.peak_memory) <= limit


@pytest.mark.parametrize(("cell", "limit"), [(0, 1), (0, 2), (3, 2), (6, 1)])
def test_it_reaches_the_proved_bound(cell, limit):
    target = TARGETS["rows"][cell]
    row = next(row for row in ROWS if (row["model"], row["m"]) == (target["model"], target["m"]))
    memory = TARGETS["limits_in_p"][limit] * row["p"]
    found = plan("zb_auto", row["p"], row["m"], costs=costs_of(row), memory_limit=memory, objective="span")
    timeline = simulate(found, costs_of(row))
    assert round(timeline.bubble_rate, 4) == target["target"][limit]
    assert max(timeline.peak_memory) <= memory * (1 + 1e-9)


@pytest.mark.parametrize(("f", "b", "w", "comm", "most"), [(10, 10, 10, 0, 755), (10, 12, 7, 1, 771)])
def test_in_a_v_it_is_at_least_as_good_as_zb_v(f, b, w, comm, most):
    costs = Costs(f=f / 2, b=b / 2, w=w / 2, comm=comm)
    found = plan("zb_auto", 8, 24, costs=costs, memory_limit=16.0, placement="v", time_limit=3.0)
    assert simulate(found, costs).makespan <= most
    assert max(simulate(found, costs).peak_memory) <= 16.0


@pytest.mark.parametrize(
    "placement, p, m, share, most",
    [("one", 4, 16, 0.25, 585), ("v", 8, 32, 0.25, 1082), ("v", 8, 32, 0.15, 1036), ("v", 8, 32, 0.4, 1425)],
)
def test_it_postpones_w_so_that_exchanges_hide_it(placement, p, m, share, most):
    """F = B = W = 10 ms of a rank without exchanges; 1F1B's memory and one `deferred` more."""
    per_rank = 1 if placement == "one" else 2
    exchange = 15 * share / (1 - share)
    times = {"f": 10 + exchange, "b": 10 + exchange, "w": 10, "exchange": exchange}
    costs = Costs(**{name: time / per_rank for name, time in times.items()})
    limit = p * per_rank + 0.5
    found = plan("zb_auto", p, m, costs=costs, memory_limit=limit, placement=placement, time_limit=1.0)
    timeline = simulate(found, costs)
    assert timeline.makespan <= most
    assert max(timeline.peak_memory) <= limit
