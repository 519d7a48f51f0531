"""Passes, as text: a program before and after."""

from zbpp import lower
from zbpp.features.gradient_release.updates import with_accumulation, with_updates
from zbpp.features.head_at_once.head_w import with_head_w
from zbpp.features.reductions.instructions import with_reductions
from zbpp.schedule import Timetable


def program(text, rank=0):
    return lower(Timetable.parse(text))[rank]


def lines(program):
    return str(program).splitlines()


def test_a_step_ends_when_its_reductions_have_ended_and_zeroes_copies_before_its_first_backward():
    found = with_reductions(program("0F0 0F1 1F0 1F1 1BW0 1BW1 0B0 0W0 0BW1"), [1, 0])
    assert lines(found) == [
        "0F0", "0F1", "1F0", "1F1", "Zero copies", "1BW0", "1BW1", "Reduce 1", "0B0", "0W0", "0BW1",
        "Reduce 0",
        "Reduced 1", "Reduced 0", "Reduce shared parameters",
    ]  # fmt: skip


def test_an_evaluation_reduces_nothing():
    forward = program("0F0 0F1")
    assert with_reductions(forward, [0]) is forward


def test_a_stage_is_updated_behind_its_last_w_or_behind_its_reduction():
    plain = program("0F0 1F0 1B0 1W0 0BW0")
    assert lines(with_updates(plain)) == [
        "0F0", "1F0", "1B0", "1W0", "Reduce 1", "Update 1", "0BW0", "Reduce 0", "Update 0",
    ]  # fmt: skip
    assert lines(with_updates(with_reductions(plain, [1]))) == [
        "0F0", "1F0", "Zero copies", "1B0", "1W0", "Reduce 1", "0BW0", "Reduce 0", "Update 0",
        "Reduced 1", "Update 1", "Reduce shared parameters",
    ]  # fmt: skip


def test_the_w_of_the_head_runs_behind_its_b():
    """In BW, all W's run behind B."""
    assert lines(with_head_w(program("0F0 0F1 1F0 1F1 1B0 1W0 1BW1 0BW0 0BW1"), 1)) == [
        "0F0", "0F1", "1F0", "1F1", "1B0", "HeadW 1W0", "1W0", "1BW1", "Reduce 1", "0BW0", "0BW1",
        "Reduce 0",
    ]  # fmt: skip


def test_each_microbatch_goes_into_the_states_and_the_last_one_updates():
    assert lines(with_accumulation(program("0F0 0F1 0F2 0B0 0B1 0W0 0W1 0BW2"))) == [
        "0F0", "0F1", "0F2", "0B0", "0B1", "0W0", "Accumulate 0W0", "0W1", "Accumulate 0W1", "0BW2",
        "Reduce 0", "Update 0",
    ]  # fmt: skip
