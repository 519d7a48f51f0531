"""Each schedule for 4 ranks and 8 microbatches is the one in tests/golden/, a text file per schedule.

To write these files again after an intended change, and then read the diff:
python -m pytest tests/families/test_golden.py --regenerate-golden
"""

import re
from pathlib import Path

import pytest

from zbpp.planning import SCHEDULES, plan, takes_costs

# A search that a time limit ends gives another timetable on another machine: no text to compare with.
FIXED = [name for name in SCHEDULES if not takes_costs(name)] + ["zb_1p", "zb_2p"]
FOLDER = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", FIXED)
def test_timetable_is_the_golden_one(name, request):
    path = FOLDER / f"{name}_p4_m8.txt"
    text = f"{plan(name, 4, 8)}\n"
    if request.config.getoption("--regenerate-golden"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", FIXED)
def test_drawing_in_the_docstring_is_the_timetable(name):
    drawing = re.search(r"p=(\d+), m=(\d+):\n((?: +\d.*\n)+)", SCHEDULES[name].__doc__)
    num_ranks, num_microbatches, rows = drawing.groups()
    lines = [line.strip() for line in rows.splitlines()]
    assert lines == str(plan(name, int(num_ranks), int(num_microbatches))).splitlines()
