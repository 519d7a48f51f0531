"""Exact planning against brute force: every timetable of tiny cases, each simulated."""

import itertools
import math
import random

import pytest

from helpers.exact import solve
from helpers.links import random_links
from zbpp.planning import lower_bound
from zbpp.planning.options import EQUAL
from zbpp.schedule import Action, Costs, Op, PlanError, Timetable, simulate

F, B, W, BW = Op.F, Op.B, Op.W, Op.BW


# ---------------------------------------------------------------- brute force


def rows_of(stages, num_microbatches):
    """Every order of a rank's actions in which microbatches ascend and F < B < W, or F < BW."""
    chains = [
        (stage, whole)
        for stage in stages
        for whole in [list(each) for each in itertools.product((False, True), repeat=num_microbatches)]
    ]
    for choice in itertools.product(*([c for c in chains if c[0] == stage] for stage in stages)):
        whole = dict(choice)
        yield from _extend(
            [], {(stage, op): 0 for stage in stages for op in (F, B, W)}, whole, num_microbatches
        )


def _extend(row, count, whole, number):
    if all(done == number for done in count.values()):
        yield list(row)
    for stage in whole:
        f, b, w = (count[stage, op] for op in (F, B, W))
        steps = []
        if f < number:
            steps.append((F, f, {F: 1}))
        if b < f and not whole[stage][b]:
            steps.append((B, b, {B: 1}))
        if b < f and whole[stage][b] and w == b:
            steps.append((BW, b, {B: 1, W: 1}))
        if w < b:
            steps.append((W, w, {W: 1}))
        for op, microbatch, added in steps:
            for each in added:
                count[stage, each] += 1
            yield from _extend([*row, Action(stage, op, microbatch)], count, whole, number)
            for each in added:
                count[stage, each] -= 1


def best_of_all(rank_of, num_microbatches, costs, limit):
    """The least makespan and the least max span."""
    stages = [[s for s, owner in enumerate(rank_of) if owner == rank] for rank in range(max(rank_of) + 1)]
    makespan = span = math.inf
    for rows in itertools.product(*(list(rows_of(each, num_microbatches)) for each in stages)):
        try:
            timeline = simulate(Timetable(rows), costs)
        except PlanError:  # it can't proceed
            continue
        if limit is None or max(timeline.peak_memory) <= limit:
            makespan, span = min(makespan, timeline.makespan), min(span, timeline.max_span)
    return {"makespan": makespan, "span": span}


@pytest.mark.parametrize(
    "rank_of, m", [((0,), 3), ((0, 1), 2), ((1, 0), 2), ((0, 1, 1), 1), ((0, 1, 1, 0), 1)]
)
@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_is_that_of_brute_force(rank_of, m, seed):
    rng = random.Random(seed)

    def numbers(largest):
        return [rng.randint(1, largest) / 4 for _ in rank_of]

    costs = Costs(
        f=numbers(30),
        b=numbers(30),
        w=numbers(30),
        bw=rng.choice((None, numbers(60))),
        comm=numbers(8),
        saved=rng.choice((1.0, numbers(8))),
        deferred=rng.choice((0.5, numbers(12))),
        reduce=rng.choice((0.0, numbers(60))),
    )
    held = costs.per_stage(len(rank_of)).memory[F]
    limit = rng.choice((None, sum(held), 1.5 * sum(held)))
    for objective, least in best_of_all(rank_of, m, costs, limit).items():
        best = solve(rank_of, m, costs=costs, memory_limit=limit, objective=objective)
        assert best.proved
        assert best.value == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("rank_of, m", [((0, 1), 2), ((1, 0), 2), ((0, 1, 1), 1), ((0, 1, 1, 0), 1)])
@pytest.mark.parametrize("seed", range(4))
def test_no_bound_is_above_the_best_of_all_timetables_over_links(rank_of, m, seed):
    rng = random.Random(seed)
    times = [[rng.randint(1, 9) for _ in rank_of] for _ in range(3)]
    costs = Costs(*times, links=random_links(rng, 2))
    for objective, least in best_of_all(rank_of, m, costs, None).items():
        found = lower_bound(objective, rank_of=rank_of, num_microbatches=m, costs=costs)
        assert found.value <= least * (1 + 1e-9)


# ---------------------------------------------------------------- exchanges, which the exact model has not


@pytest.mark.parametrize(
    "rank_of, m", [((0,), 3), ((0, 1), 2), ((1, 0), 2), ((0, 1, 1), 1), ((0, 1, 1, 0), 1)]
)
@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_no_bound_is_above_the_best_of_all_timetables_with_exchanges(rank_of, m, seed):
    rng = random.Random(seed)
    exchange = [rng.choice((0, 1, rng.randint(1, 9))) for _ in rank_of]
    f, b = ([part + rng.randint(0, 9) for part in exchange] for _ in range(2))
    w, bw = [rng.randint(1, 12) for _ in rank_of], None
    if seed % 2:
        bw = [each + rng.randint(0, 9) for each in b]
    costs = Costs(f=f, b=b, w=w, bw=bw, exchange=exchange, comm=rng.randint(0, 3))
    for limit in (None, 1.5 * len(rank_of)):
        for objective, least in best_of_all(rank_of, m, costs, limit).items():
            bound = lower_bound(
                objective, rank_of=rank_of, num_microbatches=m, costs=costs, memory_limit=limit
            )
            assert bound.value <= least * (1 + 1e-9)


# ---------------------------------------------------------------- proof, memory, start


@pytest.mark.parametrize("rank_of", [(0, 0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 0, 1, 0)])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_bound_holds_where_a_rank_owns_neighbouring_stages(rank_of, objective):
    """A rank may then start later than it could, which shortens its span but must not pass the bound."""
    for costs in (Costs(), Costs(f=2, b=1, w=1, comm=1), Costs(f=[1, 3, 1, 2][: len(rank_of)], b=2, w=1)):
        for limit in (None, 3):
            best = solve(rank_of, 2, costs=costs, memory_limit=limit, objective=objective)
            bound = lower_bound(
                objective, rank_of=rank_of, num_microbatches=2, costs=costs, memory_limit=limit
            )
            assert best.proved
            assert bound.value <= best.value * (1 + EQUAL)


# ---------------------------------------------------------------- errors
