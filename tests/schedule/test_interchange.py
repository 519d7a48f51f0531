"""torch's CSV and JSON: what is written, what is read, what is refused.

That torch reads it so and dumps it so is held by tests/test_torch_runtime.py, with torch itself.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timetables import random_timetable
from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import PlanError, Timetable, from_csv, from_json, simulate, to_csv, to_json

FORMS = [(to_csv, from_csv), (to_json, from_json), (str, Timetable.parse)]


@pytest.mark.parametrize("write, read", FORMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_round_trips(name, write, read):
    timetable = plan(name, 2, 4, time_limit=0.3)
    assert read(write(timetable)) == timetable
    assert read(write(timetable.forward_only())) == timetable.forward_only()


@pytest.mark.parametrize("write, read", FORMS)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_any_timetable_round_trips(write, read, seed):
    timetable = random_timetable(random.Random(seed))
    again = read(write(timetable))
    assert again == timetable
    assert again.rank_of == timetable.rank_of
    assert write(again) == write(timetable)


def test_csv_has_torchs_letters():
    """B is I there, and BW is B: a mix-up computes something, so it is spelled out here."""
    assert to_csv(Timetable.parse("0F0 0B0 0W0 0F1 0BW1\n1F0 1BW0 1F1 1B1 1W1")) == (
        "0F0,0I0,0W0,0F1,0B1\n1F0,1B0,1F1,1I1,1W1"
    )


def test_json_is_an_object_that_others_can_read():
    assert json.loads(to_json(plan("zb_v", 2, 2))) == {
        "format": "zbpp timetable 1",
        "num_ranks": 2,
        "num_stages": 4,
        "num_microbatches": 2,
        "rank_of": [0, 1, 1, 0],
        "rows": [
            "0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1",
            "1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 2B1 2W1 1B1 1W1",
        ],
    }


def test_no_text_ends_with_a_line_break():
    """Printed or written line by line it gets one; a second one is one more rank to torch."""
    assert not any(write(plan("zb_h1", 2, 4)).endswith("\n") for write, _ in FORMS)


@pytest.mark.parametrize(
    "text",
    [
        ",0F0,,0B0\r\n1F0,1B0,\r\n",  # as csv writers end their lines
        "0F0,0B0\r1F0,1B0\r",
        "\n0F0,0B0\n\n1F0,1B0\n\n",
        " 0F0 ,\t0B0\n1F0, 1B0",
        '"0F0","0B0"\n"1F0",1B0',
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0",
    ],
)
def test_what_is_no_computation_is_left_out(text):
    assert from_csv(text) == Timetable.parse("0F0 0BW0\n1F0 1BW0")


def test_an_overlapped_pair_is_its_two_actions_in_order():
    text = "0F0,(0F1;0B0)OVERLAP_F_B,( 0F2 ; 0B1 )OVERLAP_F_B,0B2"
    assert str(from_csv(text)) == "0F0 0F1 0BW0 0F2 0BW1 0BW2"


def test_only_format_and_rows_are_needed():
    text = '{"rows": ["0F0 0BW0", "  1F0   1BW0 "], "format": "zbpp timetable 1", "made by": "hand"}'
    assert from_json(text) == Timetable.parse("0F0 0BW0\n1F0 1BW0")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a timetable needs at least one rank"),
        (
            "0F0,0B0\n\n1F0,,1G0",
            "line 3, cell 3: '1G0' is no action; an action is stage, F|I|W|B, microbatch, such as 2F5",
        ),
        ("0F0,0BW0", "line 1, cell 2: '0BW0' is no action; an action is stage, F|I|W|B, microbatch"),
        ("0F0 0B0", "line 1, cell 1: '0F0 0B0' is no action"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", "line 1, cell 2: '0X0' is no action"),
        ("0F0,(0F1;(0F2;0B0)OVERLAP_F_B)OVERLAP_F_B", "line 1, cell 2: '(0F1;(0F2;0B0)OVERLAP_F_B)OVERLAP_F"),
        ("0F0,(0F1;0B0)OVERLAP", "line 1, cell 2: '(0F1;0B0)OVERLAP' is no action"),
        ("0F0,0SEND_F", "line 1, cell 2: '0SEND_F' is no action"),
        ("0F0,0I99999999999", "line 1, cell 2: '0I99999999999' names an index above 2147483647"),
        ("0F0,0B0\n,,\n", "line 2 has no actions; every rank owns at least one stage"),
        ("0F0,,0B0\n,,0F1", "line 2, cell 3: '0F1': stage 0 is on rank 0 and on rank 1; it has one owner"),
        ("0F0,(0F1;3B0)OVERLAP_F_B", "line 1, cell 2: '3B0': stages must be 0..S-1 without a gap; found "),
        (f"0F0\n{'1' * 200_000}", "line 2 is no CSV: field larger than field limit"),
    ],
)  # fmt: skip
def test_what_a_csv_is_refused_for(text, message):
    with pytest.raises(PlanError) as caught:
        from_csv(text)
    assert str(caught.value).startswith(message)


def rows(*given, **entries):
    return json.dumps({"format": "zbpp timetable 1", "rows": list(given), **entries})


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"format":\n  "zbpp', "line 2, column 3 is no JSON: Unterminated string starting at"),
        ("0F0 0BW0", "line 1, column 2 is no JSON: Extra data"),
        ("[" * 100_000, "no JSON that can be read: "),
        ("9" * 10_000, "no JSON that can be read: "),
        ("[]", 'a JSON object with "format": "zbpp timetable 1" is expected, not []'),
        ("{}", 'a JSON object with "format": "zbpp timetable 1" is expected, not None'),
        (rows("0F0", format="zbpp timetable 2"), 'a JSON object with "format": "zbpp timetable 1" is'),
        (rows(rows="0F0"), '"rows" is \'0F0\'; a list of texts, one per rank, is expected'),
        (rows(), "a timetable needs at least one rank"),
        (rows("0F0", 3), 'rows[1] is 3; a text such as "0F0 0BW0" is expected'),
        (rows("0F0", " "), "rows[1] is ' '; a text such as"),
        (rows("0F0", "1F0 1I0"), "rows[1], word 2: '1I0' is no action; an action is stage, F|B|W|BW"),
        (rows("0F0", "1F0 0BW0"), "rows[1], word 2: '0BW0': stage 0 is on rank 0 and on rank 1"),
        (rows("0F0", "1F0", rank_of=[1, 0]), '"rank_of" is [1, 0], but the rows say [0, 1]'),
        (rows("0F0", num_microbatches=2), '"num_microbatches" is 2, but the rows say 1'),
        (rows("0F0", num_ranks=None), '"num_ranks" is None, but the rows say 1'),
    ],
)  # fmt: skip
def test_what_a_json_is_refused_for(text, message):
    with pytest.raises(PlanError) as caught:
        from_json(text)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 300


def test_a_rank_that_cannot_proceed_is_for_simulate_to_find():
    timetable = from_csv("0B0,0F0")
    with pytest.raises(PlanError, match="rank 0 waits in 0BW0 for"):
        simulate(timetable)
