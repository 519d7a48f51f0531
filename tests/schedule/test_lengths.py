"""Costs of microbatches of different lengths: a simulation by hand, closed forms, refusals."""

import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from helpers.timetables import by_hand, choose_offload, makes, random_timetable, with_offload
from zbpp.planning import plan
from zbpp.schedule import Costs, Op, PlanError, simulate
from zbpp.schedule.timeline import transfers_of

LINEAR = Costs(f=7.5, b=7.5, w=7.5, comm=1.0)
QUADRATIC = Costs(f=2.5, b=5, w=0)


def random_costs(rng, num_stages, num_microbatches):
    """Costs of lengths, and the same as functions of (stage, op, microbatch): time, message, memory."""
    lengths = [rng.choice((0.0, 0.5, 1.0, rng.uniform(0.1, 3))) for _ in range(num_microbatches)]
    linear = {name: [rng.uniform(0.5, 3) for _ in range(num_stages)] for name in ("f", "b", "w", "comm")}
    held = {name: [rng.uniform(0.5, 3) for _ in range(num_stages)] for name in ("saved", "deferred")}
    squared = {name: [rng.uniform(0, 2) for _ in range(num_stages)] for name in ("f", "b", "w")}
    costs = Costs.of_lengths(lengths, Costs(**linear, **held), Costs(**squared))

    def time(stage, op, microbatch):
        length = lengths[microbatch]
        names = {Op.F: "f", Op.B: "b", Op.W: "w", Op.BW: "bw"}[op]
        return (
            sum(linear[n][stage] * length + squared[n][stage] * length**2 for n in names)
            if op == Op.BW
            else linear[names][stage] * length + squared[names][stage] * length**2
        )

    def change(stage, op, microbatch):
        saved, deferred = held["saved"][stage], held["deferred"][stage]
        by_op = {Op.F: saved, Op.B: deferred - saved, Op.W: -deferred, Op.BW: -saved}
        return by_op[op] * lengths[microbatch]

    return costs, time, lambda stage, microbatch: linear["comm"][stage] * lengths[microbatch], change


@pytest.mark.parametrize("seed", range(40))
def test_every_action_and_level_is_that_of_a_simulation_by_hand(seed):
    rng = random.Random(seed)
    timetable = random_timetable(rng)
    costs, time, message, change = random_costs(rng, timetable.num_stages, timetable.num_microbatches)
    timeline = simulate(timetable, costs)
    ends = by_hand(timetable, time, message)
    for (rank, position), end in ends.items():
        assert timeline.ends[rank][position] == pytest.approx(end, abs=1e-12)
    for row, peak in zip(timetable.rows, timeline.peak_memory, strict=True):
        assert peak == pytest.approx(max(accumulate(change(*action) for action in row)), abs=1e-12)
    for each in transfers_of(timeline):
        position = timetable.rows[each.sender].index(_maker(timetable, each.value))
        sent = timeline.ends[each.sender][position]
        stage = timetable.rows[each.sender][position].stage
        assert each.arrived == pytest.approx(sent + message(stage, each.value.microbatch))


def _maker(timetable, value):
    actions = (action for row in timetable.rows for action in row)
    return next(each for each in actions if str(value) in makes(each, timetable.num_stages))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("length", [0.0, 0.5, 1.0, 2.0])
def test_equal_lengths_cost_what_one_length_costs(name, length):
    """Everything scales: messages, copies to the host, exchanges and memory too."""
    timetable = plan(name, 3, 6)
    linear = replace(LINEAR, bw=14.0, host=2.0, exchange=1.0, static=3.0, reduce=2.0)
    costs = Costs.of_lengths([length] * 6, linear, QUADRATIC)
    plain = Costs(
        f=7.5 * length + 2.5 * length**2, b=7.5 * length + 5 * length**2, w=7.5 * length,
        bw=14 * length + 5 * length**2, comm=length, saved=length, deferred=length / 2, host=2 * length,
        exchange=length, static=3.0, reduce=2.0,
    )  # fmt: skip
    offload = choose_offload(simulate(timetable, plain), plain, 2.0)
    assert choose_offload(simulate(timetable, costs), costs, 2.0) == offload
    one, other = with_offload(timetable, costs, offload), with_offload(timetable, plain, offload)
    for left, right in zip(one.ends, other.ends, strict=True):
        np.testing.assert_allclose(left, right)
    assert one.makespan == pytest.approx(other.makespan)
    assert one.peak_memory == pytest.approx(other.peak_memory)
    assert [each.end for each in one.copies] == pytest.approx([each.end for each in other.copies])
    assert costs.uniform.per_stage(3).duration == plain.per_stage(3).duration


def test_one_rank_takes_the_sum_whatever_the_order():
    """f + b + w = 22.5 l + 7.5 l^2: an empty microbatch costs nothing."""
    lengths = [0.5, 2.0, 0.0, 1.0]
    costs = Costs.of_lengths(lengths, LINEAR, QUADRATIC)
    expected = sum(22.5 * each + 7.5 * each**2 for each in lengths)
    for order in ([0, 1, 2, 3], [2, 1, 0, 3]):
        assert simulate(plan("zb_h1", 1, 4), costs.reordered(order)).makespan == pytest.approx(expected)
    assert 4 * sum(getattr(costs.uniform, name) for name in "fbw") == pytest.approx(expected)


def test_an_order_names_the_microbatch_at_each_place():
    assert Costs.of_lengths([3, 1, 2], Costs()).reordered([1, 2, 0]).lengths == (1.0, 2.0, 3.0)
    assert Costs().reordered([1, 0]) == Costs()
    drawn = np.array([3.0, 1.0, 2.0])
    assert Costs(lengths=drawn) == Costs.of_lengths(drawn, Costs()) == Costs.of_lengths([3, 1, 2], Costs())
    assert Costs(lengths=drawn).reordered(np.argsort(drawn)).lengths == (1.0, 2.0, 3.0)


def test_without_lengths_both_parts_count_once():
    both = Costs(f=1, b=2, w=3, quadratic=Costs(f=10, b=20, w=30))
    assert both.per_stage(1).duration == Costs(f=11, b=22, w=33).per_stage(1).duration


REFUSED = {
    "negative": (lambda: Costs.of_lengths([1, -2], Costs()), "length -2 of microbatch 1"),
    "nan": (lambda: Costs.of_lengths([float("nan")], Costs()), "length nan of microbatch 0"),
    "infinite": (lambda: Costs.of_lengths([float("inf")], Costs()), "length inf of microbatch 0"),
    "no number": (lambda: Costs.of_lengths([1, "2"], Costs()), "length '2' of microbatch 1"),
    "a bool": (lambda: Costs.of_lengths([True], Costs()), "length True of microbatch 0"),
    "none": (lambda: Costs.of_lengths([], Costs()), "one number per microbatch"),
    "too few": (
        lambda: simulate(plan("zb_h1", 2, 4), Costs.of_lengths([1, 2], Costs())),
        "2 lengths for 4 microbatches",
    ),
    "too many for plan": (
        lambda: plan("zb_h1", 2, 4, costs=Costs.of_lengths([1] * 5, Costs())),
        "5 lengths for 4 microbatches",
    ),
    "no order": (lambda: Costs.of_lengths([1, 2], Costs()).reordered([0, 0]), "no order of 2 microbatches"),
    "quadratic memory": (
        lambda: Costs.of_lengths([1], Costs(), Costs(saved=2.0)),
        "only f, b, w and bw grow with the square",
    ),
    "lists of two lengths": (
        lambda: Costs(f=[1, 2], quadratic=Costs(f=[1, 2, 3])).per_stage(2),
        "lists of 2 and of 3 numbers",
    ),
    "quadratic number": (lambda: Costs(quadratic=2.0), "write quadratic=Costs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_length_is_refused_in_one_line(case):
    make, says = REFUSED[case]
    with pytest.raises(PlanError, match=says) as refusal:
        make()
    assert "\n" not in str(refusal.value)
