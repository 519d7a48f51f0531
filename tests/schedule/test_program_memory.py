"""The predicted curve: against the simulator's peaks, and against a step that is counted by hand."""

from dataclasses import replace

import pytest

from helpers.timetables import away
from zbpp import Costs, Timetable, lower, plan, simulate
from zbpp.features.activation_offload.copies import with_copies
from zbpp.features.gradient_release.updates import with_accumulation, with_updates
from zbpp.features.post_validation.gate import gate_of, with_gate
from zbpp.schedule import Op, Value
from zbpp.schedule.interpret.memory import excess, program_memory
from zbpp.schedule.interpret.stage_bytes import StageBytes, released, validated_later, weights_on_host


def predict_memory(timetable, stages, *passes):
    """What each rank holds over a step of its program, with these passes."""
    programs = [*lower(timetable)]
    for each in passes:
        programs = [*map(each, programs)]
    return [program_memory(program, stages) for program in programs]


def gated(timetable):
    """A pass that puts the gates into the timetable's programs."""
    programs = lower(timetable)
    return lambda program: with_gate(program, gate_of(programs, program.rank))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "v_half", "interleaved_1f1b"])
def test_without_messages_the_peak_is_the_simulated_one(schedule):
    timetable = plan(schedule, 4, 8)
    num = timetable.num_stages
    saved, deferred, static = [[3.0 + s for s in range(num)], [2.0] * num, [100.0 * s for s in range(num)]]
    stages = [
        StageBytes(weights=a, saved=b, deferred=c) for a, b, c in zip(static, saved, deferred, strict=True)
    ]
    expected = simulate(timetable, Costs(saved=saved, deferred=deferred, static=static)).peak_memory
    assert [max(rank.totals) for rank in predict_memory(timetable, stages)] == list(expected)


def test_one_microbatch_on_two_ranks_by_hand():
    """Rank 1 keeps x until W and g until B; each rank has a receive buffer, from the begin on."""
    timetable = Timetable.parse("0F0 0B0 0W0\n1F0 1B0 1W0")
    stages = [
        StageBytes(weights=1000, gradients=500, saved=10, deferred=4, g=7, sent_x=7),
        StageBytes(weights=2000, gradients=600, saved=20, deferred=6, x=7, sent_g=7, x_until=Op.W),
    ]
    first, second = predict_memory(timetable, stages)
    #                              begin  F            B             W
    assert list(first.totals) == [1007, 1007 + 10 + 7, 1007 + 4 + 7, 1007 + 500 + 7]
    assert list(second.totals) == [2007, 2007 + 20, 2007 + 6 + 7, 2007 + 600 + 7]
    assert first.peak_at == "0W0"
    assert {name: size for name, size in first.at_peak.items() if size} == {
        "weights": 1000,
        "gradients": 500,
        "buffers": 14,
    }
    assert excess([first, second], [1500, 5000]) == {0: 1014 + 500 - 1500}


def test_what_an_action_needs_for_itself_counts_at_the_peak():
    stages = [StageBytes(weights=10, saved=5, deferred=2, rises=(50, 3, 0, 3), update=30)]
    (rank,) = predict_memory(plan("zb_h1", 1, 1), stages)
    assert (rank.peak, rank.peak_at, rank.at_peak["temporary"]) == (60, "0F0", 45)


def test_offloaded_weights_take_two_buffers_of_the_largest_block():
    stages = [weights_on_host(StageBytes(weights=20), parameters=20, block=each) for each in (10, 8)]
    (rank,) = predict_memory(plan("interleaved_zb", 1, 2, stages_per_rank=2), stages)
    assert (rank.levels[0].sum(), rank.host) == (20, 40)


def test_gradients_of_offloaded_weights_are_on_the_device_from_the_first_w_of_a_step_to_the_last():
    stage = weights_on_host(StageBytes(weights=20, gradients=20, optimizer=40), parameters=20, block=5)
    (rank,) = predict_memory(Timetable.parse("0F0 0F1 0B0 0W0 0B1 0W1"), [stage])
    #                              begin F0  F1  B0  W0  B1  W1
    assert list(rank.totals) == [10, 10, 10, 10, 30, 30, 10]
    assert rank.peak == 30
    assert (rank.update, rank.host) == (10, 80)


def test_activations_that_are_away_and_gradients_that_are_released_by_hand():
    """F, then away until B; the gradient goes behind W, and the update needs 30 more there."""
    timetable = Timetable.parse("0F0 0F1 0B0 0W0 0B1 0W1")
    stage = StageBytes(weights=100, gradients=50, saved=20, leaves=15, deferred=4, update=30)
    trip = away(Value("saved", 0, 0), made=0, dropped=1, fetched=2, used=2)
    passes = (lambda program: with_copies(program, trip)), with_updates
    (rank,) = predict_memory(timetable, [released(stage, is_shared=False)], *passes)
    #                              begin  F0   F1        B0        W0             B1        W1
    assert list(rank.totals) == [100, 120, 140 - 15, 124, 120 + 50, 150 + 4, 150]
    assert (rank.during[-1], rank.update, rank.host) == (180, 100, 15)
    (shared,) = predict_memory(timetable, [released(stage, is_shared=True)], *passes)
    assert (shared.during[-1], shared.update) == (154, 180)


def test_with_accumulation_gradients_last_from_a_w_to_the_states():
    timetable = Timetable.parse("0F0 0F1 0B0 0W0 0B1 0W1")
    stage = StageBytes(weights=100, gradients=50, saved=20, deferred=4, update=30)
    (rank,) = predict_memory(timetable, [released(stage, is_shared=False)], with_accumulation)
    #                              begin  F0   F1   B0   W0        B1   W1
    assert list(rank.totals) == [100, 120, 140, 124, 120 + 50, 104, 150]
    assert (rank.during[3], rank.during[-1], rank.update) == (120 + 50 + 30, 180, 100)


def test_post_validation_holds_copies_and_the_last_gradients_until_the_gate():
    stage = StageBytes(weights=100, gradients=50, optimizer=200, saved=20, deferred=4)
    changed = validated_later(stage, trained=100)
    timetable = Timetable.parse("0F0 0F1 0B0 0W0 0B1 0W1")
    (rank,) = predict_memory(timetable, [changed], gated(timetable))
    plain = predict_memory(timetable, [stage])[0].totals
    assert list(rank.totals - plain) == [350, 350, 350, 0, 0, 0, 0]
    assert rank.update == plain[-1] + 300  # the copies of the next update
    (rank,) = predict_memory(timetable, [replace(changed, update=90)], gated(timetable))
    assert rank.peak == rank.update == sum(rank.at_peak.values()) == plain[-1] + 300 + 90
    assert (rank.peak_at, rank.at_peak["copies"], rank.at_peak["temporary"]) == ("the update", 300, 90)
    scaled = validated_later(stage, trained=100, copies_gradients=True)  # copies gradients, too
    assert scaled.copies == changed.copies + 50
