"""Reductions of complete stages in simulated timelines: by hand, and against a naive queue."""

import random

import pytest

from helpers.timetables import random_timetable
from zbpp.planning import plan
from zbpp.schedule import Costs, Op, PlanError, Timetable, simulate
from zbpp.schedule.timeline import Reduction


def test_a_rank_reduces_one_stage_after_the_other_beside_its_computation():
    """Stages 3 and 0 of rank 0 are complete at 11 and 12, stage 2 of rank 1 at 7."""
    timetable = Timetable.parse("0F0 3F0 3B0 0B0 3W0 0W0\n1F0 2F0 2B0 2W0 1BW0")
    assert simulate(timetable).reductions == ()
    timeline = simulate(timetable, Costs(reduce=[1, 0, 2.5, 4]))
    assert timeline.reductions == (
        Reduction(3, 0, 11.0, 15.0),
        Reduction(0, 0, 15.0, 16.0),
        Reduction(2, 1, 7.0, 9.5),
    )
    assert timeline.makespan == 16
    assert timeline.tail == 4
    assert timeline.span(0) == timeline.max_span == 12
    assert timeline.bubble == simulate(timetable).bubble


def naive_reductions(timetable, timeline, reduce):
    """Per rank: take whichever stage was complete first, and wait for it."""
    ends = {}
    for rank, row in enumerate(timetable.rows):
        for action, end in zip(row, timeline.ends[rank].tolist(), strict=True):
            if action.op in (Op.W, Op.BW):
                ends[action.stage] = max(end, ends.get(action.stage, 0.0))
    for rank in range(timetable.num_ranks):
        free, left = 0.0, {stage: ends[stage] for stage in timetable.stages_of(rank)}
        while left:
            stage = min(left, key=left.get)
            start = max(free, left.pop(stage))
            free = start + reduce[stage]
            yield stage, rank, start, free


def test_reductions_are_those_of_a_naive_queue(first_seed):
    for seed in range(first_seed, first_seed + 200):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        reduce = [rng.uniform(0.1, 9) for _ in range(timetable.num_stages)]
        costs = Costs(f=[rng.uniform(1, 9) for _ in reduce], w=2.5, comm=0.5, reduce=reduce)
        timeline = simulate(timetable, costs)
        assert sorted(timeline.reductions) == sorted(naive_reductions(timetable, timeline, reduce))
        last_end = max(end[-1] for end in timeline.ends)
        last = max(last_end, max(each.end for each in timeline.reductions))
        assert timeline.makespan == last - min(start[0] for start in timeline.starts)
        assert timeline.tail == pytest.approx(last - last_end)


def test_reductions_change_no_action_and_no_memory():
    timetable = plan("zb_v", 4, 8)
    without, with_them = simulate(timetable), simulate(timetable, Costs(reduce=7))
    assert [each.tolist() for each in with_them.ends] == [each.tolist() for each in without.ends]
    assert with_them.peak_memory == without.peak_memory
    assert with_them.bubble_rate == without.bubble_rate


def test_evaluation_reduces_nothing():
    timeline = simulate(plan("zb_v", 2, 4).forward_only(), Costs(reduce=5))
    assert timeline.reductions == ()
    assert timeline.tail == 0


@pytest.mark.parametrize("reduce", [-1, [1, -2], float("nan"), "12", [1, 2, 3]])
def test_a_reduce_that_is_no_cost_of_two_stages_is_refused(reduce):
    with pytest.raises(PlanError, match="reduce"):
        simulate(plan("zb_h1", 2, 4), Costs(reduce=reduce))
