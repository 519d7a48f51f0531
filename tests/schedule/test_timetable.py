"""Rows, timetables and their text."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timetables import random_timetable
from zbpp.planning import plan
from zbpp.schedule import Action, Op, PlanError, Row, Timetable

actions = st.builds(Action, st.integers(0, 99), st.sampled_from(list(Op)), st.integers(0, 9999))


@given(actions)
def test_an_actions_text_round_trips(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("word", ["", "F0", "0F", "0f0", "0X0", "0WB0", " 0F0", "0F-1", "0F0,", "٣F0"])
def test_a_word_that_is_no_action_is_refused(word):
    with pytest.raises(
        PlanError, match="is no action; an action is stage, F|B|W|BW, microbatch, such as 2F5"
    ):
        Action.parse(word)


@pytest.mark.parametrize("word", ["0F2147483648", "99999999999F0", f"0F{'1' * 5000}"])
def test_an_index_above_32_bits_is_refused(word):
    with pytest.raises(PlanError, match="names an index above 2147483647"):
        Action.parse(word)


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_a_timetables_text_round_trips(seed):
    timetable = random_timetable(random.Random(seed))
    again = Timetable.parse(str(timetable))
    assert again == timetable
    assert hash(again) == hash(timetable)
    assert str(again) == str(timetable)
    assert (again.rank_of, again.num_stages) == (timetable.rank_of, timetable.num_stages)


def test_an_error_in_a_text_names_line_and_word():
    with pytest.raises(PlanError, match=r"^line 3, word 2: '1G0' is no action"):
        Timetable.parse("0F0 0BW0\n\n1F0 1G0")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a timetable needs at least one rank"),
        (
            "0F0\n0BW0",
            "line 2, word 1: '0BW0': stage 0 is on rank 0 and on rank 1; a stage can be on one rank only",
        ),
        ("0F0\n2F0", "line 2, word 1: '2F0': stages must be 0..S-1 without a gap; found 0, 2"),
        ("1F0", "line 1, word 1: '1F0': stages must be 0..S-1 without a gap; found 1"),
    ],
)
def test_a_timetable_has_every_stage_once(text, message):
    with pytest.raises(PlanError) as caught:
        Timetable.parse(text)
    assert str(caught.value) == message


def test_a_rank_without_actions_is_refused():
    with pytest.raises(PlanError, match="rank 1 has no actions; every rank owns at least one stage"):
        Timetable([[Action(0, Op.F, 0)], []])


@pytest.mark.parametrize("action", [Action(-1, Op.F, 0), Action(0, Op.F, -1)])
def test_negative_indices_are_refused(action):
    with pytest.raises(PlanError):
        Timetable([[action]])


def test_forward_only_keeps_placement_and_order():
    assert str(plan("zb_v", 2, 2).forward_only()) == "0F0 0F1 3F0 3F1\n1F0 2F0 1F1 2F1"


def test_a_row_is_a_sequence_of_actions():
    row = Timetable.parse("0F0 0F1 0BW0 0BW1").rows[0]
    assert len(row) == 4
    assert row[1] == Action(0, Op.F, 1)
    assert row[-1] == Action(0, Op.BW, 1)
    assert list(row) == [row[i] for i in range(4)]
    assert next(reversed(row)) == row[3]
    assert Action(0, Op.BW, 0) in row
    assert row.index(Action(0, Op.BW, 0)) == 2
    assert isinstance(row[0].op, Op)
    assert type(row[0].stage) is int
    with pytest.raises(IndexError):
        row[4]


def test_a_slice_of_a_row_is_a_row_over_the_same_memory():
    row = plan("zb_h1", 2, 50).rows[0]
    part = row[10:20]
    assert isinstance(part, Row)
    assert list(part) == list(row)[10:20]
    assert np.shares_memory(part.ops, row.ops)


def test_a_row_holds_12_bytes_an_action():
    row = plan("zb_h1", 2, 1000).rows[0]
    columns = (row.stages, row.ops, row.microbatches)
    assert sum(column.nbytes for column in columns) == 12 * len(row)
    assert not hasattr(row, "__dict__")  # so there is no room for a list of Actions
