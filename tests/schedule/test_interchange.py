"""torch's CSV beside the timetable's own text: what is written, what is read, what is refused.

That torch reads it so and dumps it so is held by tests/test_torch_runtime.py, with torch itself.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timetables import random_timetable
from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import PlanError, Timetable, from_csv, to_csv

FORMS = [(to_csv, from_csv), (str, Timetable.parse)]


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
def test_cells_without_computation_are_left_out(text):
    assert from_csv(text) == Timetable.parse("0F0 0BW0\n1F0 1BW0")


def test_an_overlapped_pair_is_its_two_actions_in_order():
    text = "0F0,(0F1;0B0)OVERLAP_F_B,( 0F2 ; 0B1 )OVERLAP_F_B,0B2"
    assert str(from_csv(text)) == "0F0 0F1 0BW0 0F2 0BW1 0BW2"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a timetable needs at least one rank"),
        (
            "0F0,0B0\n\n1F0,,1G0",
            "line 3, cell 3: '1G0' is no action; an action is stage, F|I|W|B, microbatch, such as 2F5",
        ),
        ("0F0,0BW0", "line 1, cell 2: '0BW0' is no action; an action is stage, F|I|W|B, microbatch"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", "line 1, cell 2: '0X0' is no action"),
        ("0F0,(0F1;(0F2;0B0)OVERLAP_F_B)OVERLAP_F_B", "line 1, cell 2: '(0F1;(0F2;0B0)OVERLAP_F_B)OVERLAP_F"),
        ("0F0,0I99999999999", "line 1, cell 2: '0I99999999999' names an index above 2147483647"),
        ("0F0,0B0\n,,\n", "line 2 has no actions; every rank owns at least one stage"),
        ("0F0,(0F1;3B0)OVERLAP_F_B", "line 1, cell 2: '3B0': stages must be 0..S-1 without a gap; found "),
        (f"0F0\n{'1' * 200_000}", "line 2 is no CSV: field larger than field limit"),
    ],
)  # fmt: skip
def test_a_wrong_csv_is_refused_with_its_place(text, message):
    with pytest.raises(PlanError) as caught:
        from_csv(text)
    assert str(caught.value).startswith(message)
