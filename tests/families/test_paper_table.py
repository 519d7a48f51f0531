"""Tables 5 and 9 of Zero Bubble (arXiv:2401.10241), to four digits."""

import json
from pathlib import Path

import pytest

from zbpp.planning import plan
from zbpp.schedule import Costs, simulate

TABLE = json.loads((Path(__file__).parent.parent / "reference" / "zb_paper_table.json").read_text())
ROWS = [dict(zip(TABLE["columns"], row, strict=True)) for row in TABLE["rows"]]


def test_the_table_has_the_papers_twelve_rows():
    assert len(ROWS) == 12


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-m{row['m']}")
def test_the_bubble_rate_is_the_one_in_the_paper(name, row):
    costs = Costs(f=row["F"], b=row["B"], w=row["W"], comm=row["comm"])
    timeline = simulate(plan(name, row["p"], row["m"]), costs)
    rate = 1 - row["m"] * (row["F"] + row["B"] + row["W"]) / timeline.max_span
    assert f"{rate:.4f}" == f"{row[name]:.4f}"
