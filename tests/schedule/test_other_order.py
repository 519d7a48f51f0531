"""Another order of the same work: legal, in the same place, holding no more."""

import random

import pytest

from helpers.timetables import random_timetable
from zbpp import plan, simulate
from zbpp.schedule import Op
from zbpp.schedule.other_order import most_held, other_order


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
)
def test_the_order_is_another_one_that_can_run_and_holds_no_more(schedule):
    check(plan(schedule, 4, 12))


@pytest.mark.parametrize("seed", range(20))
def test_any_timetable_has_other_orders(seed):
    check(random_timetable(random.Random(seed)), is_small=True)


@pytest.mark.parametrize("seed", range(20))
def test_stages_that_share_a_parameter_add_to_its_gradient_in_one_order(seed):
    """Also where a stage then has to hold more between B and W."""
    rng = random.Random(seed)
    timetable = plan("zb_v", 3, 6) if seed < 5 else random_timetable(rng)
    sharing = rng.sample(range(timetable.num_stages), rng.randint(0, timetable.num_stages))
    other = other_order(timetable, seed, sharing)
    simulate(other)
    for row, others in zip(timetable.rows, other.rows, strict=True):
        assert adding(row, sharing) == adding(others, sharing)
        assert len([each for each in others if each.op != Op.W]) == len(
            [each for each in row if each.op != Op.W]
        )


def adding(row, sharing):
    return [(s, m) for s, op, m in row if s in sharing and op in (Op.W, Op.BW)]


def check(timetable, *, is_small=False):
    others = [other_order(timetable, seed) for seed in range(3)]
    for other in others:
        simulate(other)  # raises PlanError for what can't run, and for microbatches that don't ascend
        assert other.rank_of == timetable.rank_of
        assert other.num_microbatches == timetable.num_microbatches
        most, given = most_held(other), most_held(timetable)
        for (name, stage), number in most.items():
            assert number <= max(given[name, stage], name == "deferred")
    assert is_small or len({timetable, *others}) == 4
    assert other_order(timetable, 0) == others[0]
