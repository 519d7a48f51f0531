"""Lower bounds: the published figures, no plan below one, and the exact optimum of small cases."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timetables import random_timetable
from zbpp.planning import plan
from zbpp.planning.bounds import certificate, lower_bound
from zbpp.schedule import Costs, PlanError, simulate

DATA = Path(__file__).parent.parent / "reference"
PAPER = json.loads((DATA / "zb_paper_table.json").read_text())
TARGETS = json.loads((DATA / "zb_targets.json").read_text())
PROFILED = {(row[0], row[2]): dict(zip(PAPER["columns"], row, strict=True)) for row in PAPER["rows"]}

COLUMNS = ((10, 10, 10, 0), (10, 12, 7, 1), (10, 16, 8, 2))  # F, B, W of a rank; message


def v_shape(num_ranks):
    there = tuple(range(num_ranks))
    return there + there[::-1]


def two_stages(f, b, w, comm):
    """Costs of a rank's work as two equal stages."""
    return Costs(f=f / 2, b=b / 2, w=w / 2, comm=comm)


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("target", TARGETS["rows"], ids=lambda row: f"{row['model']}-m{row['m']}")
def test_max_span_bounds_are_the_40_targets(target):
    row = PROFILED[target["model"], target["m"]]
    p, m, work = row["p"], row["m"], row["m"] * (row["F"] + row["B"] + row["W"])
    costs = Costs(f=row["F"], b=row["B"], w=row["W"], comm=row["comm"])
    rates = [
        1
        - work
        / lower_bound("span", rank_of=range(p), num_microbatches=m, costs=costs, memory_limit=k * p).value
        for k in TARGETS["limits_in_p"]
    ]
    assert [f"{rate:.4f}" for rate in rates] == [f"{rate:.4f}" for rate in target["target"]]


@pytest.mark.parametrize("row", PROFILED.values(), ids=lambda row: f"{row['model']}-m{row['m']}")
def test_zb_h1_is_optimal_at_the_memory_of_1f1b(row):
    costs = Costs(f=row["F"], b=row["B"], w=row["W"], comm=row["comm"])
    for objective in ("span", "makespan"):
        assert certificate(plan("zb_h1", row["p"], row["m"]), costs, objective, row["p"]).proved_optimal


@pytest.mark.parametrize(
    "limit, values",
    [
        (8, (755, 762.5, 931)),
        (6, (775, 820.5, 999)),
        (16 / 3, (800, 846, 1029)),
        (5, (805, 849.5, 1033)),
        (4, (835, 878.5, 1067)),
        (None, (755, 738, 865)),
    ],
)
def test_the_makespan_bounds_of_a_v_are_the_recorded_ones(limit, values):
    """p = 8, m = 24, limits in activations of a rank: half of one per stage."""
    for column, value in zip(COLUMNS, values, strict=True):
        in_stages = None if limit is None else 2 * limit
        bound = lower_bound(
            "makespan",
            rank_of=v_shape(8),
            num_microbatches=24,
            costs=two_stages(*column),
            memory_limit=in_stages,
        )
        assert math.isclose(bound.value, value)


@given(st.integers(2, 12), st.integers(1, 30), st.data())
def test_the_makespan_bound_of_a_v_of_unit_passes_is_its_closed_form(p, more, data):
    """n microbatches, k stage-activations: 6n + 6p - 3k - 1, or from 1.5 p on 6n + 3p - k - 1."""
    k, n = data.draw(st.integers((2 * p + 2) // 3 + 1, 2 * p)), 2 * p + more
    bound = lower_bound("makespan", rank_of=v_shape(p), num_microbatches=n, memory_limit=k)
    assert math.isclose(bound.value, 6 * n - 1 + max(6 * p - 3 * k, 3 * p - k))


# ---------------------------------------------------------------- no plan is below


def random_costs(rng, num_stages, *, alike):
    def numbers(smallest, largest=10.0):
        if alike:
            return rng.uniform(smallest, largest)
        return [rng.uniform(smallest, largest) for _ in range(num_stages)]

    return Costs(
        f=numbers(1),
        b=numbers(1),
        w=numbers(0),
        bw=rng.choice((None, None, numbers(1, 20))),
        comm=numbers(0) if rng.random() < 0.5 else 0.0,
        saved=numbers(0.5) if rng.random() < 0.5 else 1.0,
        deferred=numbers(0) if rng.random() < 0.5 else 0.5,
        reduce=numbers(0, 30) if rng.random() < 0.5 else 0.0,
    )


def assert_not_below(timetable, costs, why):
    """Its own peak memory is the tightest limit that a timetable meets."""
    timeline = simulate(timetable, costs)
    for objective, value in (("makespan", timeline.makespan), ("span", timeline.max_span)):
        for limit in (None, timeline.peak_memory):
            bound = lower_bound(
                objective,
                rank_of=timetable.rank_of,
                num_microbatches=timetable.num_microbatches,
                costs=costs,
                memory_limit=limit,
            )
            assert bound.value <= value * (1 + 1e-9), f"{why}: {objective}, limit {limit}, {bound}"


def test_no_timetable_is_below_a_bound(first_seed):
    for seed in range(first_seed, first_seed + 400):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        assert_not_below(timetable, random_costs(rng, timetable.num_stages, alike=seed % 2), f"seed {seed}")


@settings(max_examples=30)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "interleaved_zb"]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 2**20),
)
def test_no_family_is_below_a_bound(name, p, rounds, seed):
    rng = random.Random(seed)
    try:
        timetable = plan(name, p, rounds * p)
    except PlanError:  # what a family can't plan
        return
    assert_not_below(timetable, random_costs(rng, timetable.num_stages, alike=seed % 2), name)


# ---------------------------------------------------------------- exact optima

ONE, V, LOOPED = (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)


def small_case(seed):
    """(rank_of, microbatches, costs, limit): whole numbers, so that CP-SAT is quick and exact."""
    rng = random.Random(seed)
    rank_of = ((0, 1), ONE, V, LOOPED, (0, 1, 2, 3), (1, 0, 1))[seed % 6]
    stages, alike = len(rank_of), seed % 4 < 2

    def numbers(smallest, largest):
        return (
            rng.randint(smallest, largest)
            if alike
            else [rng.randint(smallest, largest) for _ in range(stages)]
        )

    costs = Costs(
        f=numbers(4, 12),
        b=numbers(4, 14),
        w=numbers(1, 12),
        bw=rng.choice((None, None, numbers(6, 20))),
        comm=rng.choice((0, numbers(0, 4))),
        saved=rng.choice((1, numbers(1, 3))),
        deferred=rng.choice((0.5, 1.0, 0.25)),
        reduce=rng.choice((0, numbers(0, 40))),
    )
    held = costs.per_stage(stages).memory[0]
    per_rank = [
        sum(h for h, owner in zip(held, rank_of, strict=True) if owner == rank) for rank in set(rank_of)
    ]
    limit = rng.choice((None, *(max(per_rank) * factor for factor in (1, 1.5, 2, 3))))
    return rank_of, rng.randint(2, 4 if stages < 4 else 3), costs, limit


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_no_bound_is_above_the_optimum(objective, seed):
    pytest.importorskip("ortools")
    from helpers.exact import solve

    rank_of, m, costs, limit = small_case(seed)
    best = solve(rank_of, m, costs=costs, memory_limit=limit, objective=objective, time_limit=5)
    bound = lower_bound(objective, rank_of=rank_of, num_microbatches=m, costs=costs, memory_limit=limit)
    assert bound.value <= best.value * (1 + 1e-9)


FIRST, SECOND, THIRD = (Costs(f=f, b=b, w=w, comm=c) for f, b, w, c in COLUMNS)


@pytest.mark.parametrize(
    "objective, rank_of, m, costs, limit",
    [
        ("makespan", ONE, 5, FIRST, 3),
        ("makespan", ONE, 5, SECOND, 3),
        ("makespan", ONE, 4, THIRD, 3),
        ("makespan", ONE, 4, SECOND, None),
        ("makespan", (0, 1, 2, 3), 5, SECOND, 4),
        ("span", ONE, 5, FIRST, 3),
        ("span", ONE, 5, SECOND, 3),
        ("span", ONE, 4, THIRD, 4.5),
        ("span", ONE, 5, SECOND, None),
        ("makespan", V, 4, two_stages(*COLUMNS[0]), 3),  # V-Half's memory: 6n + 6p - 3k - 1 units
        ("makespan", V, 4, two_stages(*COLUMNS[0]), 4),
        ("makespan", V, 4, two_stages(*COLUMNS[1]), 4),
        ("makespan", V, 4, two_stages(*COLUMNS[2]), 4),
        ("span", V, 4, two_stages(*COLUMNS[1]), 4),
        ("makespan", v_shape(3), 4, two_stages(*COLUMNS[1]), 4),
        ("makespan", LOOPED, 4, two_stages(*COLUMNS[0]), 4),
        ("makespan", LOOPED, 4, two_stages(*COLUMNS[1]), 6),
    ],
)
def test_these_bounds_are_attained(objective, rank_of, m, costs, limit):
    pytest.importorskip("ortools")
    from helpers.exact import solve

    bound = lower_bound(objective, rank_of=rank_of, num_microbatches=m, costs=costs, memory_limit=limit)
    best = solve(
        rank_of,
        m,
        costs=costs,
        memory_limit=limit,
        objective=objective,
        time_limit=20,
        known_bound=bound.value,
    )
    assert math.isclose(best.value, bound.value)


# ---------------------------------------------------------------- exchanges


def test_a_plan_that_hides_all_it_can_is_certified_optimal():
    """F's down, then F and B in turns, exchanges within; the last W of rank 0 is hidden in none."""
    costs = Costs(f=15, b=15, w=10, exchange=5)
    found = plan("zb_auto", 4, 16, costs=costs, memory_limit=4.5)
    seen = certificate(found, costs, memory_limit=4.5)
    assert (seen.value, seen.proved_optimal) == ((4 + 16 - 1) * 30 + 10, True)


# ---------------------------------------------------------------- arguments by hand


def test_the_bound_of_a_single_microbatch_is_its_chain():
    """F's down, B's up, W on stage 0, messages between ranks only; one rank runs the other W's, too."""
    costs = Costs(f=[1, 2, 3, 4], b=[5, 6, 7, 8], w=1, comm=0.5)
    for rank_of, messages in (((0, 1, 2, 3), 6), ((0, 1, 1, 0), 4), ((0, 0, 0, 0), None)):
        bound = lower_bound("makespan", rank_of=rank_of, num_microbatches=1, costs=costs)
        chain = 10 + 26 + (4 if messages is None else 1 + 0.5 * messages)
        assert math.isclose(bound.value, chain)


def test_in_the_memory_of_one_microbatch_the_bound_adds_up_round_trips():
    """Room for one: F, B there and back, and W, one microbatch after the other; the last W is rank 0's."""
    costs = Costs(f=2, b=3, w=1, comm=4)
    bound = lower_bound("makespan", rank_of=[0, 1], num_microbatches=5, costs=costs, memory_limit=1)
    assert math.isclose(bound.value, 5 * (2 + 4 + 2 + 3 + 4 + 3 + 1))
    assert bound.argument == "round trips through the memory of rank 0"


# ---------------------------------------------------------------- certificates and errors


def test_a_plan_that_attains_the_bound_is_certified_optimal():
    seen = certificate(plan("zb_v", 8, 24), two_stages(*COLUMNS[0]), memory_limit=16)
    assert (seen.value, seen.bound, seen.gap, seen.proved_optimal) == (755, 755, 0, True)
    assert seen.argument == "work and forced idle time of rank 7"


def test_equal_reductions_are_added_to_makespan_and_bound_alike():
    """With one stage per rank every plan ends with a reduction; the span counts actions alone."""
    timetable, without, reducing = plan("zb_h1", 4, 12), Costs(), Costs(reduce=5)
    for objective, added in (("makespan", 5), ("span", 0)):
        before, after = (certificate(timetable, costs, objective, 4) for costs in (without, reducing))
        assert before.proved_optimal
        assert after.proved_optimal
        assert (after.value, after.bound) == (before.value + added, before.bound + added)


def test_a_plan_above_the_limit_gets_no_certificate():
    with pytest.raises(PlanError, match="the timetable needs 8 on rank 0, the memory limit allows 4"):
        certificate(plan("gpipe", 2, 8), memory_limit=4)
    with pytest.raises(PlanError, match="the timetable has no backward"):
        certificate(plan("gpipe", 2, 8).forward_only())
