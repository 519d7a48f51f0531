"""The papers' closed forms, over drawn sizes and costs. Costs are whole numbers: sums are exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpp.schedule import Costs, Timeline, compare, plan, simulate

ranks = st.integers(2, 9)


@st.composite
def times(draw):
    """F, B, W with W <= F and W <= B, where the closed forms of ZB-H1 and ZB-H2 are meant to hold."""
    f, b = draw(st.integers(10, 40)), draw(st.integers(10, 40))
    return f, b, draw(st.integers(2, min(f, b)))


def max_span_bubble(timeline: Timeline, work_per_microbatch: float) -> float:
    """The paper's bubble: the largest span less the work that one rank has to do."""
    return timeline.max_span - timeline.timetable.num_microbatches * work_per_microbatch


@settings(max_examples=40)
@given(ranks, st.integers(1, 30), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_bubble_of_1f1b_and_gpipe(p, m, f, b, w):
    """(p - 1)(F + B + W), for any times and any number of microbatches."""
    for name in ("1f1b", "gpipe"):
        timeline = simulate(plan(name, p, m), Costs(f=f, b=b, w=w))
        assert max_span_bubble(timeline, f + b + w) == (p - 1) * (f + b + w)


@settings(max_examples=40)
@given(ranks, st.integers(1, 6), times(), st.integers(0, 1))
def test_bubble_of_1f1b_with_latency(p, rounds, fbw, c):
    """+ [2(p - 1)m/p + 2(p - 2)]c where p divides m."""
    f, b, w = fbw
    timeline = simulate(plan("1f1b", p, rounds * p), Costs(f=f, b=b, w=w, comm=c))
    latency = (2 * (p - 1) * rounds + 2 * (p - 2)) * c
    assert max_span_bubble(timeline, f + b + w) == (p - 1) * (f + b + w) + latency


@settings(max_examples=40)
@given(ranks, st.integers(0, 12), times(), st.integers(0, 1))
def test_bubble_of_zb_h1(p, extra, fbw, c):
    """(p - 1)(F + B - W + 4c) while W >= 2c; a shorter W can't hide a message there and back."""
    f, b, w = fbw
    timeline = simulate(plan("zb_h1", p, 2 * p - 1 + extra), Costs(f=f, b=b, w=w, comm=c))
    assert max_span_bubble(timeline, f + b + w) == (p - 1) * (f + b - w + 4 * c)


@settings(max_examples=40)
@given(ranks, st.integers(0, 12), times(), st.integers(0, 1))
def test_bubble_of_zb_h2(p, extra, fbw, c):
    """(p - 1)(F + B - 2W + 2c): none at equal times."""
    f, b, w = fbw
    timeline = simulate(plan("zb_h2", p, 2 * p - 1 + extra), Costs(f=f, b=b, w=w, comm=c))
    assert max_span_bubble(timeline, f + b + w) == (p - 1) * (f + b - 2 * w + 2 * c)


@pytest.mark.parametrize("p", [4, 8, 16])
def test_zb_v_has_no_bubble_at_equal_times(p):
    for m in (2 * p - 1, 2 * p, 4 * p):
        timeline = simulate(plan("zb_v", p, m))
        assert timeline.bubble == 0
        assert timeline.max_span == 6 * m


@pytest.mark.parametrize("p", [4, 8, 16])
def test_zb_v_holds_2p_stage_activations_on_every_rank(p):
    assert simulate(plan("zb_v", p, 3 * p)).peak_memory == (2 * p,) * p


@settings(max_examples=40)
@given(ranks, st.integers(0, 10))
def test_peak_memory(p, extra):
    """1F1B holds p - r activations on rank r, GPipe m, ZB-H1 at most 1F1B's p, ZB-H2 2p - 1."""
    m = 2 * p - 1 + extra
    peaks = {name: simulate(plan(name, p, m)).peak_memory for name in ("1f1b", "gpipe", "zb_h1", "zb_h2")}
    assert peaks["1f1b"] == tuple(range(p, 0, -1))
    assert peaks["gpipe"] == (m,) * p
    assert max(peaks["zb_h1"]) == p
    assert max(peaks["zb_h2"]) == 2 * p - 1


@pytest.mark.parametrize(
    "costs, makespans",
    [
        (Costs(f=10, b=10, w=10), {"1f1b": 930, "zb_h1": 790, "zb_v": 755}),
        (Costs(f=10, b=12, w=7, comm=1), {"1f1b": 953, "zb_h1": 829, "zb_v": 771}),
        (Costs(f=10, b=16, w=8, comm=2), {"1f1b": 1162, "zb_h1": 998, "zb_v": 952}),
    ],
)
def test_makespans_of_a_synchronous_step(costs, makespans):
    """p = 8, m = 24, the same model for all: a stage of ZB-V is half as long."""
    outcomes = compare(makespans, 8, 24, costs=costs)
    assert {name: timeline.makespan for name, timeline in outcomes.items()} == makespans


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_one_rank_has_no_bubble(name):
    timeline = simulate(plan(name, 1, 5), Costs(f=3, b=2, w=1, comm=7))
    assert timeline.bubble == 0
    assert timeline.makespan == 5 * 6 * timeline.timetable.num_stages
