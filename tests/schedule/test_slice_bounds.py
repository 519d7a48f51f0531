"""Which bounds slices of sequences can have: one law for plans, pipelines, configs and the command line."""

import numpy as np
import pytest

from zbpp.planning import plan
from zbpp.schedule import PlanError
from zbpp.schedule.slice_bounds import bounds_for, checked_bounds

TIMETABLE, WHOLE = plan("1f1b", 1, 2, num_slices=3), plan("1f1b", 1, 2)


@pytest.mark.parametrize("given", [[0, 6, 9, 12], (0, 1, 2, 3), range(4), np.array([0, 6, 9, 12])])
def test_bounds_that_ascend_from_0_are_taken_from_any_sequence(given):
    found = bounds_for(TIMETABLE, given)
    assert found == tuple(given)
    assert all(type(each) is int for each in found)
    assert checked_bounds(given) == tuple(given)
    assert checked_bounds([each / 4 for each in given]) == tuple(each / 4 for each in given)


def test_whole_sequences_need_no_bounds():
    for given in ((), [], (0, 12)):
        assert bounds_for(WHOLE, given) == ()


WRITE = "write where each slice begins, from 0 on, and the sequence's end"
NONE = [
    12,
    None,
    "0369",
    [0],
    [1, 6, 9, 12],
    [-3, 0, 6, 9],
    [0, True, 6, 9],
    [0, "6", 9, 12],
    [0, 6, 9, 1e60],
]
NONE += [[0, 6, 9, float("nan")]]


@pytest.mark.parametrize("given", NONE, ids=str)
def test_what_are_no_bounds_is_told_what_to_write(given):
    with pytest.raises(PlanError, match=rf"^slice_bounds=.*: {WRITE}, as \[0, 4096, 8192\]$"):
        checked_bounds(given)
    with pytest.raises(PlanError, match=rf"^slice_bounds=.*: {WRITE}, in tokens, as \[0, 4096, 8192\]$"):
        bounds_for(TIMETABLE, given)


@pytest.mark.parametrize("given", [[0, 6, 6, 12], [0, 6, 4, 12]])
def test_a_slice_without_tokens_is_named(given):
    says = rf"^--slices=.*: slice 1, \[6, {given[2]}\), has no tokens: let the bounds ascend$"
    for call in (
        lambda: checked_bounds(given, name="--slices"),
        lambda: bounds_for(TIMETABLE, given, name="--slices"),
    ):
        with pytest.raises(PlanError, match=says):
            call()


@pytest.mark.parametrize(
    ("timetable", "given", "says"),
    [
        (TIMETABLE, (), rf"has 3 slices, and slice_bounds= is missing: {WRITE}, in tokens.*balanced_bounds"),
        (
            TIMETABLE,
            (0, 6, 12),
            r"=\(0, 6, 12\) has 2 slices, the timetable has 3: write 4 numbers, or plan with",
        ),
        (TIMETABLE, (0.0, 4.0, 8.0, 12.0), rf"{WRITE}, in tokens"),
        (WHOLE, (0, 6, 12), r"=\(0, 6, 12\) has 2 slices, the timetable has 1: .* or plan with num_slices=2"),
    ],
)
def test_bounds_that_do_not_fit_the_timetable_are_refused(timetable, given, says):
    with pytest.raises(PlanError, match=says):
        bounds_for(timetable, given)
