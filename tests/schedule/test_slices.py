"""Timetables whose sequences come in slices: texts, the order of a stage, the edges that it implies."""

import copy
import itertools
import pickle
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timetables import by_hand, random_timetable
from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import (
    Action,
    Costs,
    Op,
    PlanError,
    Timetable,
    Unit,
    Value,
    from_csv,
    lower,
    simulate,
    to_csv,
)
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.interpret.timing import of_steps


def drawn(seed, num_slices):
    return random_timetable(random.Random(seed), num_slices=num_slices)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_text_and_csv_round_trip(seed, num_slices):
    timetable = drawn(seed, num_slices)
    for again in (
        Timetable.parse(str(timetable)),
        from_csv(to_csv(timetable)),
        pickle.loads(pickle.dumps(timetable)),
    ):
        assert again == timetable
        assert (again.num_slices, again.num_units) == (num_slices, timetable.num_microbatches * num_slices)
        assert str(again) == str(timetable)
    assert list(map(str, timetable.rows[0])) == str(timetable.rows[0]).split()


def test_a_unit_is_its_number_and_writes_its_slice():
    unit = Unit(43, 8)
    assert {43: "found"}[unit] == "found"
    assert (unit.microbatch, unit.slice, str(unit), f"{unit:>4}") == (5, 3, "5.3", " 5.3")
    assert (str(Action(2, Op.F, unit)), str(Value("x", 1, unit))) == ("2F5.3", "x(1,5.3)")
    for again in (copy.deepcopy(unit), pickle.loads(pickle.dumps(unit))):
        assert (again, again.num_slices) == (43, 8)
    assert Action.parse("2F5.3", num_slices=8) == (2, Op.F, 43)


def test_every_view_of_a_timetable_keeps_its_slices():
    timetable = plan("zb_v", 2, 2, num_slices=2)
    assert str(timetable.forward_only()).splitlines()[0] == "0F0.0 0F0.1 0F1.0 3F0.0 0F1.1 3F0.1 3F1.0 3F1.1"
    assert str(timetable.rows[0][:2]) == "0F0.0 0F0.1"
    assert str(of_steps(timetable, 2)).split()[-1].endswith("3.0")
    assert "in 2 slices" in repr(timetable)
    assert str(timetable.forward_of_one()) == "0F0 3F0\n1F0 2F0"  # a prediction takes the sequence whole
    assert Timetable([list(row) for row in timetable.rows]) == timetable
    values = Values.of(timetable)
    assert list(map(str, values.named(values.produced_in(timetable.rows[0])[1][:2]))) == [
        "x(1,0.0)",
        "saved(0,0.0)",
    ]


def test_programs_name_slices():
    program = str(lower(plan("1f1b", 2, 1, num_slices=2))[1])
    assert program.split("\n")[:3] == ["Recv x(1,0.0) from 0", "1F0.0", "Recv x(1,0.1) from 0"]
    assert "1BW0.1\nSend g(0,0.1) to 0" in program


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0.0 0F0.1 0BW0", "line 1, word 3: '0BW0' names no slice, but the slices are 0..1"),
        ("0F0.99999999999", "line 1, word 1: '0F0.99999999999' names an index above 2147483647"),
        ("0F9999999.9999999", "line 1, word 1: '0F9999999.9999999' names an index above 2147483647"),
        ("0F0. 0BW0", "line 1, word 1: '0F0.' is no action"),
    ],
)
def test_what_is_no_slice_is_refused_with_its_place(text, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        Timetable.parse(text)


def test_rows_of_different_slices_are_refused():
    one, other = plan("1f1b", 2, 2), plan("1f1b", 2, 1, num_slices=2)
    with pytest.raises(PlanError, match="num_slices=1, 2: write one whole number"):
        Timetable([one.rows[0], other.rows[1]])


ORDER = {
    "B ascends": (
        "0F0.0 0F0.1 0B0.0 0B0.1 0W0.1 0W0.0",
        "0B0.1 comes after 0B0.0: B or BW of a stage must ascend in microbatch and descend in slice: a slice "
        "needs the gradients of its keys and values that the slices behind it make",
    ),
    "BW ascends": ("0F0.0 0F0.1 0BW0.0 0BW0.1", "0B0.1 comes after 0B0.0: B or BW of a stage must"),
    "W ascends": ("0F0.0 0F0.1 0B0.1 0B0.0 0W0.0 0W0.1", "0W0.1 comes after 0W0.0: W or BW of a stage must"),
    "microbatches descend": (
        "0F0.0 0F0.1 0F1.0 0F1.1 0BW1.1 0BW1.0 0BW0.1 0BW0.0",
        "0B0.1 comes after 0B1.0: B or BW of a stage must ascend in microbatch and descend in slice",
    ),
    "F descends": (
        "0F0.1 0F0.0 0BW0.1 0BW0.0",
        "0F0.0 comes after 0F0.1: F of a stage must ascend in microbatch and slice: a slice needs the keys",
    ),
    "missing": ("0F0.0 0F0.1 0F1.0 0BW0.1 0BW0.0 0BW1.0", "0F1.1 is missing: a stage has one F per slice"),
    "repeated": ("0F0.0 0F0.1 0F0.1 0BW0.1 0BW0.0", "0F0.1 repeats: a stage has one F per slice"),
    "early": (
        "0F0.0 0BW0.1 0F0.1 0BW0.0",
        "the timetable cannot proceed: rank 0 waits in 0BW0.1 for g(0,0.1)",
    ),
}


@pytest.mark.parametrize("case", ORDER)
def test_an_order_that_slices_cannot_have_is_refused_with_what_is_wrong(case):
    text, message = ORDER[case]
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        simulate(Timetable.parse(text))


def edges(action, num_slices):
    """(the earlier action of the same stage, the later one) for kv and dkv, by hand from the table."""
    stage, op, unit = action
    m, k = divmod(int(unit), num_slices)
    if op == Op.F and k > 0:  # F consumes kv(s, m, k - 1)
        yield [(stage, Op.F, m * num_slices + k - 1)], action
    if op in (Op.B, Op.BW) and k < num_slices - 1:  # B consumes dkv(s, m, k + 1)
        later = m * num_slices + k + 1
        yield [(stage, Op.B, later), (stage, Op.BW, later)], action


@pytest.mark.parametrize("num_slices", [2, 3, 5])
def test_saved_and_the_order_imply_every_edge_of_keys_values_and_their_gradients(num_slices, first_seed):
    """Drawn executions obey x, g, saved and the order; nothing in their making knows kv or dkv."""
    for seed in range(first_seed, first_seed + 60):
        timetable = drawn(seed, num_slices)
        simulate(timetable)
        for row in timetable.rows:
            position = {tuple(action): place for place, action in enumerate(row)}
            for makers, action in itertools.chain.from_iterable(edges(each, num_slices) for each in row):
                (made,) = (position[maker] for maker in makers if maker in position)
                assert made < position[tuple(action)], f"seed {seed}: {action}"


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"zb_1p", "zb_2p", "zb_auto"}))
def test_every_family_plans_slices_or_says_how_many_microbatches_it_needs(name):
    for p, m, s in itertools.product((1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 3, 4, 8)):
        timetable = planned(name, p, m, s)
        assert timetable.num_slices == s
        simulate(timetable)


def planned(name, p, m, s):
    """The plan for m microbatches, or else for the number that the refusal names."""
    try:
        return plan(name, p, m, num_slices=s)
    except PlanError as refusal:
        needed = re.search(r"num_microbatches >= .* = (\d+)|nearest that are: \d+, (\d+)$", str(refusal))
        return plan(name, p, int(needed[1] or needed[2]), num_slices=s)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("num_slices", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_units_cost_their_tokens_and_the_keys_that_they_read(num_slices, seed):
    """By hand: a slice [a, b) has b - a tokens; they read (b * b - a * a) / 2 keys of 1 / 2 in all."""
    rng = random.Random(seed)
    timetable = drawn(seed, num_slices)
    stages, num_microbatches = range(timetable.num_stages), timetable.num_microbatches
    bounds = [0, *sorted(rng.sample(range(1, 100), num_slices - 1)), 100]
    lengths = [rng.choice((0.5, 1.0, 2.0)) for _ in range(num_microbatches)]
    names = ("f", "b", "w", "comm", "saved", "deferred", "past_gradients")
    linear = {name: [rng.uniform(1.0, 3) for _ in stages] for name in names}
    past = [rng.uniform(0, 1) for _ in stages]
    squared = {name: [rng.uniform(0, 2) for _ in stages] for name in "fbw"}
    costs = Costs.of_lengths(lengths, Costs(**linear, past=past), Costs(**squared)).sliced(bounds)

    def size(unit):
        m, k = divmod(int(unit), num_slices)
        a, b = bounds[k] / 100, bounds[k + 1] / 100
        return lengths[m] * (b - a), lengths[m] ** 2 * (b * b - a * a)

    def time(stage, op, unit):
        length, square = size(unit)
        return sum(linear[n][stage] * length + squared[n][stage] * square for n in op.name.lower())

    timeline = simulate(timetable, costs)
    ends = by_hand(timetable, time, lambda stage, unit: linear["comm"][stage] * size(unit)[0])
    for (rank, position), end in ends.items():
        assert timeline.ends[rank][position] == pytest.approx(end, abs=1e-12)
    for row, peak in zip(timetable.rows, timeline.peak_memory, strict=True):
        assert peak == pytest.approx(held_by_hand(row, size, lengths, linear, past, num_slices), abs=1e-12)


def held_by_hand(row, size, lengths, linear, past, num_slices):
    """The largest sum of what is held: by slices, and keys and values and their gradients by microbatches."""
    held, most = {}, 0.0
    for stage, op, unit in row:
        m, k = divmod(int(unit), num_slices)
        alone = (linear["saved"][stage] - past[stage]) * size(unit)[0]
        if op == Op.F:
            held["saved", stage, unit] = alone
            held.setdefault(("past", stage, m), past[stage] * lengths[m])
        if op in (Op.B, Op.BW):
            del held["saved", stage, unit]
            if num_slices > 1:
                held["grads", stage, m] = linear["past_gradients"][stage] * lengths[m]
            if k == 0:
                del held["past", stage, m]
                held.pop(("grads", stage, m), None)
        if op == Op.B:
            held["deferred", stage, unit] = linear["deferred"][stage] * size(unit)[0]
        if op == Op.W:
            del held["deferred", stage, unit]
        most = max(most, sum(held.values()))
    return most


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_slices_together_cost_what_the_whole_costs(name):
    costs = Costs(f=3, b=4, w=2, saved=5, deferred=2, quadratic=Costs(f=1, b=2, w=0))
    whole = simulate(plan(name, 1, 3), costs)
    for cut in (costs, costs.sliced([0, 5, 7, 8]), costs.sliced([0, 0.2, 0.5, 1.0])):
        timeline = simulate(plan(name, 1, 3, num_slices=3), cut)
        assert timeline.makespan == pytest.approx(whole.makespan)


def test_without_bounds_slices_are_alike():
    timeline = simulate(plan("1f1b", 2, 2, num_slices=4), Costs(f=8, b=4, w=4, saved=4))
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        np.testing.assert_allclose(ends - starts, 2.0)
    assert timeline.peak_memory == (5.0, 4.0)


REFUSED = {
    "from 1": (lambda: Costs().sliced([1, 2]), "where each slice begins, from 0 on"),
    "a number": (lambda: Costs(slice_bounds=2), "slice_bounds=2: write where each slice begins, from 0 on"),
    "no tokens": (lambda: Costs().sliced([0, 4, 4, 8]), r"slice 1, \[4, 4\), has no tokens"),
    "another number": (
        lambda: simulate(plan("zb_h1", 2, 2, num_slices=2), Costs().sliced([0, 1, 2, 3])),
        "Costs: 3 slices, the timetable has 2",
    ),
    "past": (lambda: Costs(saved=1, past=2), r"Costs\(past=2\) is a part of saved, which is 1"),
    "num_slices": (
        lambda: plan("zb_h1", 2, 2, num_slices=0),
        "num_slices=0: write a whole number, 1 or more",
    ),
    "the paper's planner": (lambda: plan("zb_1p", 2, 2, num_slices=2), "zb_1p has no slices"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_slicing_is_refused_in_one_line(case):
    make, says = REFUSED[case]
    with pytest.raises(PlanError, match=says) as refusal:
        make()
    assert "\n" not in str(refusal.value)
