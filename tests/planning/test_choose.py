"""Which schedule to use: the ranking, its bounds, and what is called optimal."""

import random
import re
from itertools import pairwise

import pytest

from helpers.exact import solve
from zbpp.planning import SCHEDULES, PlanningRequest, RankCosts, choose
from zbpp.planning.options import EQUAL
from zbpp.planning.placement import PLACEMENTS
from zbpp.render import render_choice
from zbpp.schedule import PlanError
from zbpp.schedule.families import FAMILIES

EQUAL_TIMES = RankCosts(f=10, b=10, w=10)
UNEVEN = RankCosts(f=10, b=12, w=7, comm=1)
LONG_B = RankCosts(f=10, b=16, w=8, comm=2)


def request(costs, **options):
    return PlanningRequest(
        **{"num_ranks": 8, "num_microbatches": 24, "time_limit": 1.0, "costs": costs, **options}
    )


@pytest.fixture(scope="module")
def answers():
    """With 1F1B's memory; the search has far too little time to do much."""
    costs = {"EQUAL_TIMES": EQUAL_TIMES, "UNEVEN": UNEVEN, "LONG_B": LONG_B}
    return {name: choose(request(each, memory_limit=8)) for name, each in costs.items()}


@pytest.mark.parametrize(("name", "makespan"), [("EQUAL_TIMES", 790), ("UNEVEN", 829), ("LONG_B", 998)])
def test_zb_h1_is_optimal_at_1f1bs_memory(answers, name, makespan):
    (choice,) = [each for each in answers[name].ranked if each.name == "zb_h1"]
    assert choice.timeline.makespan == choice.bound.value == makespan
    assert choice.proved_optimal


def test_what_is_called_optimal_is_no_longer_than_the_exact_solution():
    """Random costs, W > B among them; CP-SAT is the judge."""
    rng = random.Random(1)
    judged = 0
    for _ in range(6):
        costs = RankCosts(
            f=rng.randint(5, 12), b=rng.randint(5, 12), w=rng.randint(2, 14), comm=rng.choice([0, 1])
        )
        limit = rng.choice([2, 3, 4])
        answer = choose(
            PlanningRequest(num_ranks=2, num_microbatches=4, costs=costs, memory_limit=limit, time_limit=0.0)
        )
        exact = solve((0, 1), 4, costs=costs.per_stage(2, 2), memory_limit=limit, time_limit=20)
        for choice in answer.ranked:
            if choice.proved_optimal and choice.placement == "one":
                assert choice.timeline.makespan <= exact.value * (1 + EQUAL), (
                    choice.name,
                    costs,
                )
                judged += 1
    assert judged >= 6


def test_everything_that_fits_is_ranked_and_the_rest_listed(answers):
    answer = answers["UNEVEN"]
    assert all(one.timeline.makespan <= other.timeline.makespan for one, other in pairwise(answer.ranked))
    assert all(max(choice.timeline.peak_memory) <= 8 for choice in answer.ranked)
    assert all(max(candidate.timeline.peak_memory) > 8 for candidate in answer.too_large)
    names = {choice.title for choice in answer.ranked} | {each.name for each in answer.too_large}
    assert names == {*FAMILIES, "zb_1p", "zb_2p", *(f"zb_auto --placement {each}" for each in PLACEMENTS)}
    assert all(choice.gap >= -EQUAL for choice in answer.ranked)


def test_the_search_is_never_worse_than_a_family(answers):
    for answer in answers.values():
        best = {choice.title: choice.timeline.makespan for choice in answer.ranked}
        for candidate in answer.ranked:
            assert best[f"zb_auto --placement {candidate.placement}"] <= candidate.timeline.makespan * (
                1 + EQUAL
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"memory_limit": 0.5}, "can't hold one microbatch; the least that works, per rank: 1, 1"),
        ({"costs": RankCosts(f=[1, 2, 3])}, "f has 3 numbers for 8 stages"),
    ],
)
def test_impossible_requests_are_refused(options, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        request(**{"costs": EQUAL_TIMES, **options})


def test_progress_rises_to_the_end():
    shares = []
    choose(
        request(LONG_B, num_ranks=4, num_microbatches=8, time_limit=1.0, memory_limit=5),
        lambda share, what: shares.append(share),
    )
    assert all(one <= other for one, other in pairwise(shares))
    assert 0 < shares[-1] <= 1


def test_the_text_has_the_plans_their_bounds_and_those_of_other_limits(answers):
    lines = render_choice(answers["UNEVEN"]).splitlines()
    assert lines[0].startswith("8 ranks, 24 microbatches, at most 8 activations per rank; times in ms")
    row = next(line for line in lines if line.startswith("zb_h1"))
    assert row.split() == ["zb_h1", "one", "829.0", "829.0", "16.04", "%", "829.0", "optimal", "8"]
    assert any(line.startswith("needs more memory") for line in lines)
    bounds = [line.split() for line in lines[lines.index("") :] if re.match(r"[\d.]+ activations", line)]
    assert [each[0] for each in bounds] == ["8", "10", "12", "16"]
    assert (bounds[0][2], bounds[0][4]) == ("829.0", "762.5")


def test_schedules_that_cannot_be_planned_say_why():
    answer = choose(request(EQUAL_TIMES, num_microbatches=7, time_limit=0.0))
    assert "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 15" in str(answer.refused["zb_h2"])
    assert "  zb_h2: zb_h2 needs num_microbatches" in render_choice(answer)
    assert len(answer.ranked) + len(answer.refused) == len(SCHEDULES) - 1 + len(PLACEMENTS)
