"""The order of unequal microbatches: brute force over all orders, bounds below all of them, limits."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from helpers.links import random_costs
from helpers.timetables import random_timetable
from zbpp.planning import lower_bound, order_bound, order_microbatches, own_path, plan
from zbpp.planning.bounds import bound_over_orders
from zbpp.planning.order.batched_timing import BatchedTiming
from zbpp.planning.order.order_microbatches import alternating, hill, least_excess
from zbpp.planning.problem import Problem
from zbpp.schedule import Costs, Links, PlanError, simulate

NAMES = ("gpipe", "1f1b", "zb_h1", "zb_v")
LONG = 60.0  # seconds: the search ends by itself long before


def costs_of(rng, num_microbatches, num_stages=1):
    lengths = [round(rng.lognormvariate(0, 0.6), 2) for _ in range(num_microbatches)]
    linear = {name: [rng.uniform(5, 9) for _ in range(num_stages)] for name in "fbw"}
    squared = {name: [rng.uniform(0, 4) for _ in range(num_stages)] for name in "fbw"}
    return Costs.of_lengths(lengths, Costs(**linear, comm=0.5), Costs(**squared))


def costs_over_links(rng, timetable):
    """Costs of lengths, over links of which some are occupied; now and then a microbatch is empty."""
    lengths = [rng.choice((0.0, *[rng.uniform(0.1, 3)] * 9)) for _ in range(timetable.num_microbatches)]
    return Costs.of_lengths(lengths, random_costs(rng, timetable))


def all_orders(timetable, costs):
    """Every order, with its timeline."""
    orders = itertools.permutations(range(timetable.num_microbatches))
    return {order: simulate(timetable, costs.reordered(order)) for order in orders}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_search_finds_the_best_of_all_orders_and_no_bound_is_above_it(name, num_ranks):
    rng = random.Random(num_ranks)
    timetable = plan(name, num_ranks, 5)
    costs = costs_of(rng, 5, timetable.num_stages)
    best = min(each.makespan for each in all_orders(timetable, costs).values())
    found = order_microbatches(timetable, costs, LONG)
    assert simulate(timetable, costs.reordered(found)).makespan == pytest.approx(best)
    assert order_bound(timetable, costs) <= best * (1 + 1e-12)
    assert own_path(timetable.rank_of, costs) <= order_bound(timetable, costs) * (1 + 1e-8)


@pytest.mark.parametrize(("name", "num_ranks", "seed"), [("1f1b", 3, 3), ("zb_v", 2, 2), ("zb_v", 3, 1)])
def test_messages_that_wait_for_one_another_decide_which_order_is_best(name, num_ranks, seed):
    """A message occupies its link for longer than an action takes: of delays alone another order is best."""
    timetable, pairs = plan(name, num_ranks, 5), {(0, 1): (2.0, 14.0), (1, 0): (3.0, 9.0)}
    costs = replace(costs_of(random.Random(seed), 5, timetable.num_stages), links=Links(1.0, pairs=pairs))
    delays = replace(costs, comm=11.0, links=Links(1.0, pairs={(0, 1): (2.0, 0.0), (1, 0): (3.0, 0.0)}))
    makespans = {order: each.makespan for order, each in all_orders(timetable, costs).items()}
    best = min(makespans.values())
    assert makespans[tuple(order_microbatches(timetable, delays, LONG))] > 1.005 * best
    assert makespans[tuple(order_microbatches(timetable, costs, LONG))] == pytest.approx(best)


@pytest.mark.parametrize("name", NAMES)
def test_within_a_memory_limit_the_best_order_is_the_best_that_fits(name):
    """At each peak that some order has, the limit leaves orders out; below the least there is none."""
    timetable = plan(name, 2, 4)
    costs = costs_of(random.Random(3), 4, timetable.num_stages)
    timelines = all_orders(timetable, costs).values()
    peaks = sorted({max(each.peak_memory) for each in timelines})
    for limit in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        fitting = [each.makespan for each in timelines if max(each.peak_memory) <= limit * (1 + 1e-9)]
        found = order_microbatches(timetable, costs, LONG, limit)
        timeline = simulate(timetable, costs.reordered(found))
        assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
        assert timeline.makespan == pytest.approx(min(fitting))
    with pytest.raises(PlanError, match="the best order found needs .* memory limit allows"):
        order_microbatches(timetable, costs, LONG, peaks[0] * 0.99)


@pytest.mark.parametrize("name", NAMES)
def test_where_no_order_fits_the_one_that_exceeds_the_limit_least_is_found_memory_grows_with_sizes(name):
    """Sizes are tokens where lengths are times: the peak is that of costs whose lengths are the sizes."""
    rng = random.Random(5)
    timetable = plan(name, 2, 4)
    costs = costs_of(rng, 4, timetable.num_stages)
    sizes = [rng.uniform(0.5, 2) for _ in range(4)]
    held = Costs.of_lengths(sizes, costs)
    peaks = {order: max(each.peak_memory) for order, each in all_orders(timetable, held).items()}
    times = {order: each.makespan for order, each in all_orders(timetable, costs).items()}
    for limit in (0.5 * min(peaks.values()), min(peaks.values()), max(peaks.values())):
        best = least_excess(timetable, costs, LONG, limit, sizes)
        assert max(best.peaks) == pytest.approx(peaks[*best.order])
        least = max(limit, min(peaks.values())) * (1 + 1e-9)
        assert peaks[*best.order] <= least
        assert times[*best.order] == pytest.approx(min(times[each] for each in times if peaks[each] <= least))
        assert bool(best.refusal("bytes")) == (limit < min(peaks.values()))


def test_a_limit_may_differ_by_rank():
    timetable, lengths = plan("zb_h1", 2, 4), [1.0, 3.0, 3.0, 1.0]
    costs = Costs.of_lengths(lengths, Costs())
    assert max(simulate(timetable, costs).peak_memory) == 6.0
    found = order_microbatches(timetable, costs, LONG, [4.0, 9.0])
    assert simulate(timetable, costs.reordered(found)).peak_memory[0] <= 4.0


@pytest.mark.parametrize("seed", range(60))
def test_no_bound_is_above_a_random_timetable_in_a_random_order(seed):
    """In order: below this timetable in this order. Over orders: below every order of it, too."""
    rng = random.Random(seed)
    timetable = random_timetable(rng, most_microbatches=4)
    costs = costs_of(rng, timetable.num_microbatches, timetable.num_stages)
    limit = max(simulate(timetable, costs).peak_memory) if seed % 2 else None
    for objective in ("makespan", "span"):
        problem = Problem(timetable.rank_of, timetable.num_microbatches, costs, limit, objective)
        timeline = simulate(timetable, costs)
        value = timeline.makespan if objective == "makespan" else timeline.max_span
        in_order = lower_bound(
            objective,
            rank_of=timetable.rank_of,
            num_microbatches=timetable.num_microbatches,
            costs=costs,
            memory_limit=limit,
        )
        assert bound_over_orders(problem).value <= value * (1 + 1e-12)
        assert in_order.value <= value * (1 + 1e-12)
    least = min(each.makespan for each in all_orders(timetable, costs).values())
    assert order_bound(timetable, costs) <= least * (1 + 1e-12)


def test_the_bounds_attain_closed_forms():
    """One microbatch: its path and its W. Two ranks, one long microbatch among empty ones: the same."""
    alone = Costs.of_lengths([2.0], Costs(f=3, b=4, w=1, comm=0.5), Costs(f=1, b=0, w=0))
    path = 2 * (6 + 4) + 2 * 8 + 2 * 1.0  # F: 3 * 2 + 1 * 4; B: 4 * 2; two messages of 0.5 * 2
    assert simulate(plan("zb_h1", 2, 1), alone).makespan == pytest.approx(path + 2)
    assert order_bound(plan("zb_h1", 2, 1), alone) == pytest.approx(path + 2)
    assert own_path((0, 1), alone) == pytest.approx(path)
    empty = Costs.of_lengths([0, 2.0, 0, 0], Costs(f=3, b=4, w=1, comm=0.5), Costs(f=1, b=0, w=0))
    assert order_bound(plan("zb_h1", 2, 4), empty) == pytest.approx(path + 2)


def test_the_bound_counts_what_a_link_carries_one_after_another():
    """F = BW = 1, x is busy for 5, on the way for 2: F, four x's, F and four BW's on rank 1, BW on rank 0."""
    costs = Costs(bw=1.0, links=Links(pairs={(0, 1): (2.0, 5.0)}))
    timetable, of_lengths = plan("gpipe", 2, 4), Costs.of_lengths([1.0] * 4, costs)
    expected = 1 + 4 * 5 + 2 + 1 + 4 + 1
    assert simulate(timetable, of_lengths).makespan == expected
    assert order_bound(timetable, of_lengths) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(60))
def test_over_links_no_bound_is_above_any_order_of_a_random_timetable(seed):
    rng = random.Random(seed)
    timetable = random_timetable(rng, most_microbatches=4)
    costs = costs_over_links(rng, timetable)
    least = min(each.makespan for each in all_orders(timetable, costs).values())
    assert order_bound(timetable, costs) <= least * (1 + 1e-12)


def test_with_equal_lengths_the_bound_of_1f1b_is_its_makespan():
    """(m + p - 1) (f + b + w): a path through the timetable, where no schedule's bound says as much."""
    timetable, costs = plan("1f1b", 4, 8), Costs.of_lengths([1.0] * 8, Costs())
    assert order_bound(timetable, costs) == pytest.approx((8 + 4 - 1) * 3)
    assert order_microbatches(timetable, costs) == list(range(8))


def test_the_hill_is_short_long_short():
    lengths = np.array([5.0, 1, 4, 2, 3, 6])
    assert lengths[hill(lengths)].tolist() == [1, 3, 5, 6, 4, 2]
    assert lengths[alternating(lengths)].tolist() == [1, 6, 2, 5, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_no_order_is_worse_than_the_hill_or_the_given_one_even_without_time(name):
    timetable = plan(name, 4, 12)
    for seed in range(3):
        costs = costs_of(random.Random(seed), 12, timetable.num_stages)
        of_hill = simulate(timetable, costs.reordered(hill(np.array(costs.lengths)).tolist())).makespan
        found = order_microbatches(timetable, costs, 0.0)
        assert sorted(found) == list(range(12))
        given = simulate(timetable, costs).makespan
        value = simulate(timetable, costs.reordered(found)).makespan
        assert value <= min(of_hill, given) * (1 + 1e-12)
        again = costs.reordered(found)  # the best order as the given one stays as good
        kept = simulate(timetable, again.reordered(order_microbatches(timetable, again, 0.0))).makespan
        assert kept <= value * (1 + 1e-12)


def test_the_same_seed_gives_the_same_order():
    timetable = plan("zb_h1", 3, 8)
    costs = costs_of(random.Random(0), 8)
    found = [order_microbatches(timetable, costs, LONG, seed=seed) for seed in (5, 5)]
    assert found[0] == found[1]


def test_costs_without_lengths_keep_the_given_order():
    assert order_microbatches(plan("zb_h1", 2, 4), Costs()) == [0, 1, 2, 3]


@pytest.mark.parametrize("has_links", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_many_orders_timed_at_once_are_each_as_simulated(seed, has_links):
    rng = random.Random(seed)
    timetable = random_timetable(rng, num_slices=1 + seed % 2 if has_links else 1)
    number = timetable.num_microbatches
    costs = costs_over_links(rng, timetable) if has_links else costs_of(rng, number, timetable.num_stages)
    timing = BatchedTiming(timetable, costs)
    orders = np.array([rng.sample(range(number), number) for _ in range(6)]).T
    timelines = [simulate(timetable, costs.reordered(order.tolist())) for order in orders.T]
    np.testing.assert_allclose(timing.makespans(orders), [each.makespan for each in timelines])
    np.testing.assert_allclose(timing.peaks(orders).T, [each.peak_memory for each in timelines], atol=1e-12)


@pytest.mark.parametrize(
    "placement, families", [("one", ("1f1b", "zb_h1", "zb_h2")), ("v", ("zb_v", "v_half"))]
)
@pytest.mark.parametrize("in_p", [None, 1.3])
def test_a_search_for_unequal_microbatches_beats_the_families_within_memory(placement, families, in_p):
    p, m = 3, 8
    per_rank = 2 if placement == "v" else 1
    costs = costs_of(random.Random(1), m)
    limit = None if in_p is None else in_p * p * per_rank * max(costs.lengths) / 2
    found = simulate(
        plan("zb_auto", p, m, costs=costs, placement=placement, memory_limit=limit, time_limit=1.5), costs
    )
    timelines = [simulate(plan(name, p, m), costs) for name in families]
    fitting = [each.makespan for each in timelines if limit is None or max(each.peak_memory) <= limit]
    assert found.makespan <= min(fitting, default=np.inf) * (1 + 1e-12)
    assert limit is None or max(found.peak_memory) <= limit * (1 + 1e-9)
    bound = lower_bound(
        "makespan",
        rank_of=found.timetable.rank_of,
        num_microbatches=m,
        costs=costs,
        memory_limit=limit,
    )
    assert bound.value <= found.makespan * (1 + 1e-12)
