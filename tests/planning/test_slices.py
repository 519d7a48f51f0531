"""Plans of sequences in slices: balanced bounds, the search, lower bounds, orders, the choice of S."""

import json
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from helpers.timetables import random_timetable
from zbpp.planning import (
    PlanningRequest,
    RankCosts,
    balanced_bounds,
    balanced_shares,
    certificate,
    choose,
    lower_bound,
    order_bound,
    order_microbatches,
    plan,
)
from zbpp.planning.problem import Problem, one_by_one
from zbpp.schedule import Costs, PlanError, simulate

# Llama-3-8B on 8 ranks at 131,072 tokens, ms and GiB, as scripts/dev/long_context_table.py computes them.
LONG = RankCosts(
    f=571.8, b=571.8, w=571.8, quadratic=RankCosts(f=1407.4, b=3518.4, w=0.0), saved=86.0, deferred=68.0
)


def unit_times(costs, bounds):
    timeline = simulate(plan("zb_h1", 1, 1, num_slices=len(bounds) - 1), costs.sliced(bounds))
    times = {}
    for action, start, end in zip(
        timeline.timetable.rows[0], timeline.starts[0], timeline.ends[0], strict=True
    ):
        times[int(action.microbatch)] = times.get(int(action.microbatch), 0.0) + end - start
    return list(times.values())


@pytest.mark.parametrize("num_slices", [1, 2, 5, 8])
def test_balanced_slices_take_equally_long(num_slices):
    costs = Costs(f=3.0, b=4.0, w=2.0, quadratic=Costs(f=5.0, b=12.0, w=0.0))
    bounds = balanced_bounds(num_slices, 10**6, costs)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 10**6, num_slices + 1)
    times = unit_times(costs, bounds)
    assert times == pytest.approx([26.0 / num_slices] * num_slices, rel=1e-4)
    lengths = [end - start for start, end in pairwise(bounds)]
    assert lengths == sorted(lengths, reverse=True)  # later slices read more keys


def test_without_attention_balanced_slices_are_equal():
    assert balanced_bounds(4, 4096, Costs(f=[1.0, 5.0])) == [0, 1024, 2048, 3072, 4096]
    assert balanced_shares(2, Costs(f=0, b=0, w=0)) == [0, 0.5, 1]


def test_a_number_counts_as_a_list_of_it_when_slices_are_balanced():
    """One part of the times may be a number and the other one a list with an entry per stage."""
    attention = Costs(f=[5.0] * 4, b=[12.0] * 4, w=0.0)
    found = balanced_shares(4, Costs(f=3.0, b=4.0, w=2.0, quadratic=attention))
    expected = balanced_shares(4, Costs(f=3.0, b=4.0, w=2.0, quadratic=Costs(f=5.0, b=12.0, w=0.0)))
    assert found == pytest.approx(expected)


def test_bounds_are_multiples_but_for_the_end():
    bounds = balanced_bounds(8, 131_071, LONG, multiple=128)
    assert all(each % 128 == 0 for each in bounds[:-1])
    assert bounds[-1] == 131_071


@pytest.mark.parametrize("costs", [Costs(), LONG], ids=["linear", "quadratic"])
def test_every_slice_has_tokens_wherever_that_can_be(costs):
    """As many slices as tokens, too: the last ones would have less than a token each."""
    for length, multiple in ((8, 1), (9, 1), (17, 2), (40, 8)):
        for num_slices in range(1, -(-length // multiple) + 1):
            bounds = balanced_bounds(num_slices, length, costs, multiple)
            assert len(bounds) == num_slices + 1
            assert (bounds[0], bounds[-1]) == (0, length)
            assert bounds == sorted({*bounds})
            assert not any(bound % multiple for bound in bounds[:-1])


@pytest.mark.parametrize(
    "arguments, says", [((9, 8), "without tokens"), ((0, 8), "num_slices=0"), ((2, 0), "length=0")]
)
def test_slices_without_tokens_are_refused(arguments, says):
    with pytest.raises(PlanError, match=says):
        balanced_bounds(*arguments, Costs())


@pytest.mark.parametrize("name, most", [("zb_v", 0.07), ("1f1b", 0.12)])
def test_the_idle_share_at_128k_tokens(name, most):
    """p = 8, m = 8, S = 8: without slices 0.35 to 0.47; equal slices are a trap."""

    def idle(num_slices, cut):
        costs = cut(LONG).per_stage(plan(name, 8, 1).num_stages, 8)
        timeline = simulate(plan(name, 8, 8, num_slices=num_slices), costs)
        work = sum(
            float((end - start).sum()) for start, end in zip(timeline.starts, timeline.ends, strict=True)
        )
        return 1 - work / 8 / timeline.makespan

    balanced = idle(8, lambda costs: costs.sliced(balanced_bounds(8, 131_072, costs)))
    assert balanced <= most
    assert idle(1, lambda costs: costs) > 0.3
    assert idle(8, lambda costs: costs.sliced(range(9))) > 1.5 * balanced


def drawn_costs(rng, num_stages, num_microbatches, num_slices):
    numbers = {name: [rng.uniform(0.5, 3) for _ in range(num_stages)] for name in ("f", "b", "w", "saved")}
    some = {
        name: [rng.uniform(0, 0.5) for _ in range(num_stages)] for name in ("comm", "past", "past_gradients")
    }
    costs = Costs(**numbers, **some, deferred=0.3, quadratic=rng.choice((None, Costs(f=1.0, b=2.0, w=0.0))))
    if rng.random() < 0.5:
        costs = costs.sliced([0, *sorted(rng.sample(range(1, 20), num_slices - 1)), 20])
    if rng.random() < 0.3:
        costs = replace(costs, lengths=[rng.uniform(0.3, 2) for _ in range(num_microbatches)])
    return costs


@pytest.mark.parametrize("seed", range(60))
def test_no_random_timetable_is_faster_than_the_bound(seed):
    """Within the memory that it needs itself, for both objectives, with slices alike and with bounds."""
    rng = random.Random(seed)
    timetable = random_timetable(rng, most_ranks=4, most_microbatches=3, num_slices=rng.randint(2, 4))
    costs = drawn_costs(rng, timetable.num_stages, timetable.num_microbatches, timetable.num_slices)
    limit = list(simulate(timetable, costs).peak_memory)
    for objective in ("makespan", "span"):
        for memory_limit in (None, limit):
            found = certificate(timetable, costs, objective, memory_limit)
            assert found.gap >= -1e-9, found


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "v_half", "interleaved_zb"])
def test_no_family_is_faster_than_the_bound_at_its_own_memory(name):
    for seed in range(6):
        rng = random.Random(seed)
        timetable = plan(name, 4, 4, num_slices=4)
        costs = drawn_costs(rng, timetable.num_stages, 4, 4)
        limit = list(simulate(timetable, costs).peak_memory)
        assert certificate(timetable, costs, "makespan", limit).gap >= -1e-9


def test_the_bound_knows_that_all_slices_run_before_the_first_b():
    """Two ranks, one microbatch: rank 1 waits f, runs S F's and a B; then rank 0 runs its B's and W's."""
    for num_slices in (1, 2, 4):
        f = b = w = 1.0 * num_slices
        bound = lower_bound(
            "makespan", rank_of=(0, 1), num_microbatches=1, num_slices=num_slices, costs=Costs(f=f, b=b, w=w)
        )
        assert bound.value == pytest.approx(1 + num_slices + 1 + 2 * num_slices)
        best = plan("zb_auto", 2, 1, num_slices=num_slices, costs=Costs(f=f, b=b, w=w), time_limit=2)
        assert simulate(best, Costs(f=f, b=b, w=w)).makespan == pytest.approx(bound.value)


@pytest.mark.parametrize("placement", ["one", "v", "looped"])
def test_the_search_is_never_worse_than_a_family_and_keeps_the_limit(placement):
    families = {
        "one": ("1f1b", "zb_h1"),
        "v": ("zb_v", "v_half"),
        "looped": ("interleaved_1f1b", "interleaved_zb"),
    }
    costs = RankCosts(
        f=4, b=6, w=3, comm=0.1, quadratic=RankCosts(f=2, b=5, w=0), past=0.05, past_gradients=0.1
    )
    costs = costs.sliced(balanced_shares(4, costs))
    own = costs.per_stage(4 if placement == "one" else 8, 4)
    limit = 2.0
    found = plan(
        "zb_auto", 4, 4, num_slices=4, costs=own, placement=placement, memory_limit=limit, time_limit=1
    )
    timeline = simulate(found, own)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    for name in families[placement]:
        family = simulate(plan(name, 4, 4, num_slices=4), own)
        if max(family.peak_memory) <= limit:
            assert timeline.makespan <= family.makespan * (1 + 1e-9)
    assert certificate(found, own, memory_limit=limit).gap >= -1e-9


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_one_microbatch_after_the_other_holds_the_least_memory(num_slices):
    for seed in range(30):
        rng = random.Random(seed)
        timetable = random_timetable(rng, most_ranks=4, most_microbatches=3, num_slices=num_slices)
        counts = timetable.num_microbatches, num_slices
        costs = replace(drawn_costs(rng, timetable.num_stages, *counts), past_gradients=rng.uniform(0, 3))
        problem = Problem(timetable.rank_of, counts[0], costs, num_slices=num_slices)
        peak = simulate(problem.timetable_of(one_by_one(problem)), costs).peak_memory
        assert problem.least_memory == pytest.approx(peak)


def test_a_limit_that_holds_no_microbatch_names_the_least():
    with pytest.raises(PlanError, match="can't hold one microbatch; the least that works, per rank: 1, 1"):
        plan("zb_auto", 2, 2, num_slices=4, memory_limit=0.9, time_limit=0)


def test_microbatches_of_different_lengths_are_ordered_with_their_slices():
    lengths = [3.0, 1.0, 2.0, 0.5, 1.5, 1.0]
    costs = Costs.of_lengths(lengths, Costs(f=2, b=3, w=1, comm=0.1), Costs(f=1, b=2, w=0)).sliced(
        [0, 3, 5, 6]
    )
    timetable = plan("zb_h1", 3, 6, num_slices=3)
    order = order_microbatches(timetable, costs, time_limit=0.3)
    best = simulate(timetable, costs.reordered(order)).makespan
    assert best < simulate(timetable, costs).makespan
    bound = order_bound(timetable, costs)
    for seed in range(20):
        drawn = random.Random(seed).sample(range(6), 6)
        assert simulate(timetable, costs.reordered(drawn)).makespan >= bound * (1 - 1e-9)
    assert best >= bound * (1 - 1e-9)


def test_the_choice_proposes_slices_where_they_pay():
    request = PlanningRequest(num_ranks=4, num_microbatches=4, costs=LONG, time_limit=0.5, slices=(1, 4))
    answer = choose(request)
    best = answer.ranked[0]
    assert best.num_slices == 4
    assert "--slices 4" in best.title
    assert {each.num_slices for each in answer.ranked} == {1, 4}
    assert all(each.gap >= -1e-9 for each in answer.ranked)
    assert json.dumps(math.floor(best.timeline.makespan))
