"""The papers' closed forms, over drawn sizes and costs. Costs are whole numbers: sums are exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpp.planning import RankCosts, compare, plan
from zbpp.schedule import Costs, Timeline, simulate
from zbpp.schedule.families import FAMILIES

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
@given(ranks, st.integers(1, 4), st.integers(1, 4), times())
def test_bubble_of_interleaved_families(p, v, rounds, fbw):
    """1F1B and looped BFS (p - 1)(F + B + W), ZB (p - 1)(F + B - W): of a stage, a v-th of a rank's share."""
    f, b, w = fbw
    formulas = {
        "interleaved_1f1b": (p - 1) * (f + b + w),
        "looped_bfs": (p - 1) * (f + b + w),
        "interleaved_zb": (p - 1) * (f + b - w),
    }
    for name, bubble in formulas.items():
        timeline = simulate(plan(name, p, rounds * p, stages_per_rank=v), Costs(f=f, b=b, w=w))
        assert max_span_bubble(timeline, v * (f + b + w)) == bubble


@settings(max_examples=40)
@given(ranks, st.integers(1, 6), st.integers(1, 4), st.integers(4, 40), st.integers(0, 1))
def test_bubble_of_interleaved_1f1b_with_latency(p, rounds, v, f, c):
    """+ (2pv - 2)c where p divides m."""
    timetable = plan("interleaved_1f1b", p, rounds * p, stages_per_rank=v)
    timeline = simulate(timetable, Costs(f=f, b=f, w=f, comm=c))
    assert max_span_bubble(timeline, 3 * v * f) == (p - 1) * 3 * f + (2 * p * v - 2) * c


@pytest.mark.parametrize(
    "name, p, peak, rates",
    [  # at m = 2p, 4p, 8p
        ("v_half", 4, 6, (0.0943, 0.0495, 0.0254)),
        ("v_half", 8, 10, (0.1504, 0.0813, 0.0424)),
        ("v_half", 16, 18, (0.1760, 0.0965, 0.0507)),
        ("v_min", 4, 4, (0.1864, 0.1028, 0.0542)),
        ("v_min", 8, 8, (0.1933, 0.1070, 0.0565)),  # other orders with this memory: .2195 .1233 .0657
        ("v_min", 16, 12, (0.2351, 0.1332, 0.0713)),
    ],
)
def test_bubble_rates_and_memory_of_v_half_and_v_min(name, p, peak, rates):
    for m, rate in zip((2 * p, 4 * p, 8 * p), rates, strict=True):
        timeline = simulate(plan(name, p, m))
        assert max(timeline.peak_memory) == peak
        assert f"{1 - 6 * m / timeline.max_span:.4f}" == f"{rate:.4f}"


@pytest.mark.parametrize("p", range(3, 13))
def test_v_half_and_v_min_reach_the_bound(p):
    """No V over m microbatches that holds k stage-activations is faster than 6m + 6p - 3k - 1 passes."""
    for name, k in (("v_half", 2 * ((p + 2) // 2)), ("v_min", 2 * ((p + 4) // 3))):
        extra = 1 if (name, p) == ("v_min", 11) else 0
        for m in (2 * p, 3 * p):
            timeline = simulate(plan(name, p, m))
            assert timeline.makespan == timeline.max_span == 6 * m + 6 * p - 3 * k - 1 + extra


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


@pytest.mark.parametrize("num_slices", range(1, 9))
@pytest.mark.parametrize("p", [2, 4, 8])
def test_bubble_and_memory_with_equal_slices(p, num_slices):
    """Bubbles are those of slices, an S-th of a microbatch's; (p + S - 1)/S microbatches are held.

    The costs are those of a slice, so that all numbers are whole.
    """
    m = -(-(2 * p - 1 + num_slices - 1) // num_slices) + 1
    for f, b, w in ((10, 10, 10), (10, 13, 7)):
        bubbles = {"1f1b": f + b + w, "gpipe": f + b + w, "zb_h1": f + b - w, "zb_h2": f + b - 2 * w}
        for name, each in bubbles.items():
            timeline = simulate(
                plan(name, p, m, num_slices=num_slices), Costs(f=f, b=b, w=w).unit_slices(num_slices)
            )
            assert max_span_bubble(timeline, num_slices * (f + b + w)) == (p - 1) * each
            held = {"gpipe": m * num_slices, "zb_h2": 2 * p - 1 + num_slices - 1}
            assert max(timeline.peak_memory) == held.get(name, p + num_slices - 1)


@pytest.mark.parametrize("num_slices", range(1, 9))
@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_v_has_no_bubble_with_equal_slices_at_equal_times(p, num_slices):
    least = -(-(2 * p - 1 + num_slices - 1) // num_slices)
    for m in (least, least + 3):
        timeline = simulate(plan("zb_v", p, m, num_slices=num_slices), Costs().unit_slices(num_slices))
        assert timeline.bubble == 0
        assert timeline.peak_memory == (2 * (p + num_slices - 1),) * p


@pytest.mark.parametrize("num_slices", [2, 4, 8])
@pytest.mark.parametrize(
    "name, stages",
    [("v_half", 2), ("v_min", 2), ("dualpipe_v", 2), ("interleaved_1f1b", 1), ("interleaved_zb", 1)],
)
def test_slices_cost_s_minus_1_slices_of_memory(name, stages, num_slices):
    """On how many stages of a rank; the costs are those of a slice."""
    peaks = [
        max(simulate(plan(name, 8, 24, num_slices=s), Costs().unit_slices(s)).peak_memory)
        for s in (1, num_slices)
    ]
    assert peaks[1] == peaks[0] + stages * (num_slices - 1)


@pytest.mark.parametrize(
    "costs, makespans",
    [
        (RankCosts(f=10, b=10, w=10), (930, 790, 755, 825, 755)),
        (RankCosts(f=10, b=12, w=7, comm=1), (953, 829, 771, 827.5, 792.5)),
        (RankCosts(f=10, b=16, w=8, comm=2), (1162, 998, 952, 995, 979)),
    ],
)
def test_makespans_of_one_model_under_five_schedules(costs, makespans):
    """p = 8, m = 24, the same model for all: with two stages per rank a stage is half as long."""
    names = ("1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipe_v")
    makespans = dict(zip(names, makespans, strict=True))
    outcomes = compare(makespans, 8, 24, costs=costs)
    assert {name: timeline.makespan for name, timeline in outcomes.items()} == makespans


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_has_no_bubble(name):
    timeline = simulate(plan(name, 1, 5), Costs(f=3, b=2, w=1, comm=7))
    assert timeline.bubble == 0
    assert timeline.makespan == 5 * 6 * timeline.timetable.num_stages
