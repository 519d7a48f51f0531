"""Advice from measured costs: what it says would be faster is faster, where the truth is constructed."""

import pytest

from zbpp.planning import plan
from zbpp.planning.advise import advise, layer_costs
from zbpp.schedule import Costs, simulate


def only(advice, kind):
    return next((each for each in advice if each.kind == kind), None)


def test_a_cut_out_of_balance_is_answered_with_the_cut_that_is_known_to_be_best():
    """8 equal layers as 1, 1, 1, 5: the best cut is 2 each, and the heaviest stage paces the pipeline."""
    timetable = plan("zb_h1", 4, 8)
    ran, best = (
        Costs(f=[each * n for n in cut], b=[each * n for n in cut], w=[each * n for n in cut])
        for cut, each in (((1, 1, 1, 5), 3.0), ((2, 2, 2, 2), 3.0))
    )
    advice = advise(timetable, ran, schedule="zb_h1", layers_per_stage=[1, 1, 1, 5])
    assert advice[0].kind == "balance"
    assert advice[0].setting == "model.layers_per_stage=[2,2,2,2]"
    # A foreign reference: the step of a model that has the advised cut from the beginning.
    assert advice[0].makespan == pytest.approx(simulate(timetable, best).makespan)
    assert advice[0].gain == pytest.approx(1 - advice[0].makespan / simulate(timetable, ran).makespan)
    assert "[2,2,2,2] would shorten the simulated step by 5" in str(advice[0])


def test_a_heavy_head_counts_as_a_head_and_gets_fewer_layers():
    """Layers of 1 ms and a head of 2 ms: 4, 3 and 1 with the head are stages of 4, 3 and 3 ms."""
    layers, first, last = layer_costs([2.0, 3.0, 5.0], [2, 3, 3])
    assert (layers, first, last) == ([1.0] * 8, 0.0, 2.0)
    costs = Costs(f=[2.0, 3.0, 5.0], b=[2.0, 3.0, 5.0], w=[2.0, 3.0, 5.0])
    advice = advise(plan("1f1b", 3, 12), costs, schedule="1f1b", layers_per_stage=[2, 3, 3])
    assert only(advice, "balance").setting == "model.layers_per_stage=[4,3,1]"


def test_balanced_layers_get_no_advice_to_cut_them_otherwise():
    advice = advise(plan("1f1b", 4, 8), Costs(), schedule="1f1b", layers_per_stage=[2, 2, 2, 2])
    assert only(advice, "balance") is None


def test_1f1b_is_told_of_a_zero_bubble_schedule_with_the_gain_of_the_paper():
    """(p - 1)(F + B + W) of bubble in 1F1B, (p - 1)(F + B - W) in ZB-H1: Qi et al., table 1."""
    p, m = 4, 8
    advice = advise(plan("1f1b", p, m), Costs(), schedule="1f1b")
    schedule = only(advice, "schedule")
    assert schedule.setting == "schedule=zb_h1"  # within 1F1B's memory, with as many stages
    assert schedule.gain == pytest.approx(1 - (3 * m + p - 1) / (3 * m + 3 * (p - 1)))
    assert schedule.memory <= 1.05


def test_more_microbatches_gain_what_the_bubbles_formula_says():
    p, m = 4, 8
    advice = advise(plan("1f1b", p, m), Costs(), schedule="1f1b")
    before, after = (number + p - 1 for number in (m, 2 * m))
    assert only(advice, "microbatches").setting == "num_microbatches=16"
    assert only(advice, "microbatches").gain == pytest.approx(1 - after / 2 / before)


def test_one_rank_has_nothing_to_gain():
    assert advise(plan("1f1b", 1, 4), Costs(), schedule="1f1b", layers_per_stage=[8]) == []
