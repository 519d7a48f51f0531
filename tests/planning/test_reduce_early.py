"""Stages are complete early: the last W's of a rank, ordered so that its reductions end early."""

import itertools
import random

import pytest

from helpers.timetables import random_timetable
from zbpp.planning import plan
from zbpp.planning.complete_stages_early import complete_stages_early
from zbpp.schedule import Action, Costs, Op, Timetable, simulate

TIMES = {"f": 1.0, "b": 1.1, "w": 0.9, "comm": 0.1}


def random_costs(rng, num_stages):
    def numbers(largest):
        return [rng.uniform(0.1, largest) for _ in range(num_stages)]

    return Costs(f=numbers(3), b=numbers(3), w=numbers(3), deferred=numbers(2), reduce=numbers(12))


def last_w(row):
    """The W's behind a row's last F, B or BW."""
    return list(itertools.takewhile(lambda action: action.op == Op.W, reversed(list(row))))[::-1]


def test_any_timetable_stays_valid_is_never_slower_and_holds_no_more(first_seed):
    num_faster = 0
    for seed in range(first_seed, first_seed + 300):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = random_costs(rng, timetable.num_stages)
        early = complete_stages_early(timetable, costs)
        before, after = simulate(timetable, costs), simulate(early, costs)  # simulate refuses what can't run
        assert after.makespan <= before.makespan
        assert after.peak_memory == before.peak_memory
        assert [sorted(row) for row in early.rows] == [sorted(row) for row in timetable.rows]
        for row, given in zip(early.rows, timetable.rows, strict=True):
            assert list(row)[: len(row) - len(last_w(row))] == list(given)[: len(given) - len(last_w(given))]
        num_faster += after.makespan < before.makespan
    assert num_faster > 10


def test_no_order_of_the_last_w_ends_the_reductions_earlier(first_seed):
    """One rank with three stages whose W's are all at the end: every order of their 6 W's is tried."""
    for seed in range(first_seed, first_seed + 20):
        rng = random.Random(seed)
        costs = random_costs(rng, 3)
        before = [Action(stage, Op.F, m) for m in range(2) for stage in (0, 1, 2)]
        before += [Action(stage, Op.B, m) for m in range(2) for stage in (2, 1, 0)]
        orders = set(itertools.permutations((0, 0, 1, 1, 2, 2)))
        makespans = [simulate(Timetable([[*before, *numbered(order)]]), costs).makespan for order in orders]
        given = Timetable([[*before, *numbered((0, 1, 2, 0, 1, 2))]])
        assert simulate(complete_stages_early(given, costs), costs).makespan == pytest.approx(min(makespans))


def numbered(stages):
    return [Action(stage, Op.W, stages[:place].count(stage)) for place, stage in enumerate(stages)]


def test_a_v_is_faster_early_than_late_and_late_than_with_all_reductions_at_the_end():
    costs = Costs(**TIMES, reduce=3)
    late = plan("zb_v", 4, 8)
    early = plan("zb_v", 4, 8, costs=costs)
    at_the_end = simulate(late, Costs(**TIMES)).makespan + 2 * 3  # two stages per rank, one after the other
    makespans = [simulate(early, costs).makespan, simulate(late, costs).makespan, at_the_end]
    assert makespans == pytest.approx([55.6, 56.5, 58.6])
    assert list(early.rows[1])[-3:] == [Action(6, Op.W, 7), Action(1, Op.W, 6), Action(1, Op.W, 7)]


# ---------------------------------------------------------------- the search, and costs of a rank's share


@pytest.mark.parametrize("placement", ["one", "v", "looped"])
@pytest.mark.parametrize("time_limit", [0, 0.3])
def test_a_search_is_never_worse_than_a_family_with_its_stages_complete_early(placement, time_limit):
    for reduce in (3.0, [9.0, *[1.0] * (3 if placement == "one" else 7)]):
        costs = Costs(**TIMES, reduce=reduce)
        found = plan("zb_auto", 4, 8, costs=costs, placement=placement, time_limit=time_limit)
        least = simulate(found, costs).makespan
        for name in ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "interleaved_zb"):
            if plan(name, 4, 8).rank_of == found.rank_of:
                family = simulate(plan(name, 4, 8, costs=costs), costs)
                assert least <= family.makespan * (1 + 1e-9)
