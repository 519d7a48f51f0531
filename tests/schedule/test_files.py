"""Files that `zbpp plan` and the trainer read: what is wrong with one is said in one line that names it."""

import json

import pytest

from zbpp.planning import RankCosts, plan, read_costs
from zbpp.schedule import PlanError, Timetable, read_timetable, to_csv

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
DEEP = "[" * 10**6
LONG = "1" * 10**5


def written(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(read, path):
    """The PlanError's text: one short line, which names the file and holds nothing that a terminal obeys."""
    with pytest.raises(PlanError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert len(text) < len(str(path)) + 300
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (DEEP, "no JSON that can be read: "),
        (f'{{"f": {LONG}}}', "no JSON that can be read: "),
        (f'{{"f": {LONG[:400]}}}', "Costs(f=111111"),
        ('{"f": "10"}', "Costs(f='10'): a cost is a number or one number per stage"),
        ('{"f": true}', "Costs(f=True): a cost is a number or one number per stage"),
        ('{"f": NaN}', "Costs(f=nan): nan must be finite and not negative"),
        ('{"f": -1}', "Costs(f=-1): -1.0 must be finite and not negative"),
        ('{"f": 1e308}', "Costs(f=1e+308): 1e+308 must be finite and not negative (at most 1e100)"),
        (json.dumps({ESCAPE: 1}), r"'\x1b[2J\x1b]0;owned\x07' is no cost; known: f, b, w, bw, comm, saved"),
        (
            json.dumps({"memory_unit": ESCAPE}),
            r"memory_unit is '\x1b[2J\x1b]0;owned\x07'; write activations or bytes",
        ),
        (json.dumps({"about": ESCAPE}), r"about is '\x1b[2J\x1b]0;owned\x07'; an object is expected"),
        ('{"quadratic": 3}', "quadratic is 3; an object with any of f, b, w, bw is expected"),
        ('{"quadratic": {"saved": 1}}', "quadratic is {'saved': 1}; an object with any of f, b, w, bw"),
        ('{"quadratic": {"f": -1}}', "Costs(f=-1): -1.0 must be finite and not negative"),
        ('{"shape": [4]}', "shape is [4]; the rows of a microbatch and the tokens of a row are expected"),
        ('{"shape": [4, 0]}', "shape is [4, 0]; the rows of"),
        (b'{"f": \xff}', "no JSON that can be read: "),
        ("{f: 1}", "line 1, column 2 is no JSON: "),
    ],
)
def test_a_hostile_costs_file_gives_one_line(tmp_path, text, complaint):
    assert refusal(read_costs, written(tmp_path, "costs.json", text)).startswith(complaint)


def test_costs_come_with_the_unit_of_their_memory(tmp_path):
    costs = {"f": [1, 2], "saved": 3e9, "deferred": 1e9}
    for unit in ({}, {"memory_unit": "bytes"}, {"shape": [4, 512]}):
        path = written(tmp_path, "costs.json", json.dumps({**costs, **unit, "about": {"device": "cpu"}}))
        assert read_costs(path) == (RankCosts(**costs, **unit), {"device": "cpu"})


@pytest.mark.parametrize(("name", "form"), [("a.txt", str), ("a.csv", to_csv)])
def test_a_plan_in_a_file_is_read_by_its_suffix(tmp_path, name, form):
    for schedule in ("zb_h1", "zb_v", "1f1b"):
        timetable = plan(schedule, 4, 8)
        assert read_timetable(written(tmp_path, name, form(timetable))) == timetable
        assert Timetable.parse(str(timetable)) == timetable


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.txt", "0F0 0G0", "line 1, word 2: '0G0' is no action"),
        ("a.txt", f"\n0F0 {ESCAPE}0B0", r"line 2, word 2: '\x1b[2J\x1b]0;owned\x070B0' is no action"),
        ("a.txt", b"0F0 \xff", "not UTF-8 text, at byte 4"),
        ("a.txt", "0F0 0W0 0B0", "the timetable cannot proceed: rank 0 waits in 0W0"),
        ("a.txt", "0F2147483647 0BW2147483647", "0F0 is missing: a stage has one F per microbatch"),
        ("a.csv", f"0F0,{ESCAPE}", r"line 1, cell 2: '\x1b[2J\x1b]0;owned\x07' is no action"),
        ("a.csv", "x" * 10**6, "line 1 is no CSV: field larger than field limit"),
    ],
)
def test_a_hostile_timetable_file_gives_one_line_with_file_and_place(tmp_path, name, text, complaint):
    assert refusal(read_timetable, written(tmp_path, name, text)).startswith(complaint)
