"""zb_auto on uneven pipelines: against every family.

The instances are those of `scripts/dev/planner_eval.py random`; its table of 100 takes minutes.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.dev.planner_eval import draw, judge
from zbpp.planning import plan
from zbpp.planning.bounds import certificate
from zbpp.planning.options import OBJECTIVES, objective_value
from zbpp.schedule import Costs, PlanError, simulate


def value_of(timetable, costs, objective):
    return objective_value(simulate(timetable, costs), objective)


def check_within(timetable, instance):
    peaks = simulate(timetable, instance.costs).peak_memory
    for peak, most in zip(peaks, instance.memory_limit or [math.inf] * len(peaks), strict=True):
        assert peak <= most * (1 + 1e-9)


@pytest.mark.parametrize("seed", [30, 36, 43, 54, 66, 89, 91, 97, 104, 113])
def test_where_the_bound_is_reached_it_beats_every_family(seed):
    """These stop at the bound within a fraction of a second, whatever time they have."""
    outcome = judge(draw(seed), time_limit=30.0)
    assert outcome.verdict == "better, optimal"


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 10_000), st.sampled_from(OBJECTIVES), st.sampled_from([0.0, 0.05]))
def test_it_is_never_worse_than_a_family_that_fits(seed, objective, time_limit):
    """One stage per rank, looped or V, with messages: however short the time is."""
    instance = draw(seed)
    found = instance.planned("zb_auto", objective=objective, time_limit=time_limit)
    check_within(found, instance)
    rivals = instance.rivals(objective)
    assert value_of(found, instance.costs, objective) <= min(rivals.values()) * (1 + 1e-9)
    assert value_of(found, instance.costs, objective) >= certificate_bound(found, instance, objective)


def certificate_bound(found, instance, objective):
    return certificate(found, instance.costs, objective, instance.memory_limit).bound * (1 - 1e-8)


def test_where_deferring_is_dear_and_memory_short_it_keeps_backwards_whole():
    """B would add to what is held: only where there is room for that are backwards split."""
    costs = Costs(saved=2, deferred=3)
    for limit, split in [(2.0, False), (8.0, True)]:
        found = plan("zb_auto", 3, 6, costs=costs, memory_limit=limit, time_limit=1.0)
        assert max(simulate(found, costs).peak_memory) <= limit
        assert any(action.op.name == "W" for row in found.rows for action in row) == split


def test_a_pipeline_that_no_family_fits_is_planned_all_the_same():
    """At what one microbatch needs, per rank, in bytes."""
    instance = draw(1)
    floor = [sum(instance.costs.saved[rank::3]) for rank in range(3)]
    tight = replace(instance, memory_limit=list(map(float, floor)))
    assert tight.num_ranks == 3
    assert tight.rivals() == {}
    check_within(tight.planned("zb_auto", time_limit=0.2), tight)
    below = replace(tight, memory_limit=[floor[0], floor[1] * 0.999, floor[2]])
    with pytest.raises(PlanError, match=f"on rank 1 can't hold one microbatch.*: {floor[0]}, {floor[1]}"):
        below.planned("zb_auto")
