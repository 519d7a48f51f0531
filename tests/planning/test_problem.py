"""The one statement of what is to be planned: what it derives, and what it refuses."""

import math
import random

import pytest

from helpers.timetables import random_placement, random_timetable
from zbpp.planning import RankCosts
from zbpp.planning.problem import Problem, one_by_one
from zbpp.schedule import Costs, PlanError, simulate


def random_costs(rng, num_stages):
    return Costs(saved=[rng.uniform(0, 3) for _ in range(num_stages)], deferred=rng.uniform(0, 3))


def test_one_by_one_runs_and_needs_the_least_memory_that_a_problem_may_allow(first_seed):
    for seed in range(first_seed, first_seed + 50):
        rng = random.Random(seed)
        rank_of = tuple(random_placement(rng, rng.randint(1, 4), rng.randint(4, 8)))
        costs, m = random_costs(rng, len(rank_of)), rng.randint(1, 4)
        problem = Problem(rank_of, m, costs, Problem(rank_of, m, costs).least_memory)
        timeline = simulate(problem.timetable_of(one_by_one(problem)), costs)
        assert timeline.peak_memory == pytest.approx(problem.least_memory)
        assert problem.value_of(timeline) == timeline.makespan
        less = [0.99 * least for least in problem.least_memory]
        with pytest.raises(PlanError, match="can't hold one microbatch; the least that works, per rank"):
            Problem(rank_of, m, costs, less)


def test_a_plan_as_ids_is_the_timetable_again(first_seed):
    for seed in range(first_seed, first_seed + 20):
        timetable = random_timetable(random.Random(seed))
        problem = Problem(timetable.rank_of, timetable.num_microbatches)
        plan = problem.plan_of(timetable)
        assert problem.timetable_of(plan) == timetable
        assert problem.numbered([[a // timetable.num_microbatches for a in row] for row in plan]) == plan


def test_a_plan_that_cannot_run_or_does_not_fit_takes_for_ever():
    problem = Problem((0,), 2, memory_limit=1)
    assert problem.value_of_plan(one_by_one(problem)) == 6
    assert problem.value_of_plan([[0, 1, 6, 7]]) == math.inf  # both F's first: 2 activations
    assert problem.value_of_plan([[6, 0, 1, 7]]) == math.inf  # 0BW0 before 0F0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 2), 1), "rank_of=(0, 2): write a rank per stage, 0..p-1 without a gap"),
        (((0, 1), 0), "num_microbatches=0: write a whole number, 1 or more"),
        (((0, 1), 1, Costs(), None, "speed"), "objective='speed': write makespan or span"),
        (((0, 1), 1, Costs(f=[1, 2, 3])), "Costs: f has 3 numbers for 2 stages"),
        (((0, 1), 1, Costs(), [1, 2, 3]), "the memory limit is a list of length 3 for 2 ranks: write one"),
        (((0, 1), 1, Costs(), -1), "the memory limit -1 on rank 0 can't hold one microbatch"),
        (
            ((0, 1, 0), 1, Costs(saved=2**30, deferred=0, memory_unit="bytes"), 2**30),
            "the memory limit 1 GiB on rank 0 can't hold one microbatch; the least that works, per rank: "
            "2147483648B, 1073741824B",
        ),
    ],
)
def test_a_problem_without_a_plan_is_refused_with_what_to_write(arguments, message):
    with pytest.raises(PlanError) as caught:
        Problem(*arguments)
    assert str(caught.value).startswith(message)


def test_rank_costs_are_the_same_model_for_any_number_of_stages():
    costs = RankCosts(f=6, saved=2, comm=1, memory_unit="bytes")
    assert costs.per_stage(2, 2) == Costs(f=6, saved=2, comm=1, b=1, w=1, deferred=0.5, memory_unit="bytes")
    assert costs.per_stage(6, 2) == Costs(
        f=2, saved=2 / 3, comm=1, b=1 / 3, w=1 / 3, deferred=0.5 / 3, memory_unit="bytes"
    )
    assert RankCosts(f=6).per_stage(4, 4) == Costs(f=6)
