"""What leaves the device between two actions: chosen so that nothing is late, simulated, and lowered."""

import random
from itertools import pairwise

import numpy as np
import pytest

from helpers.timetables import choose_offload, random_timetable, with_offload
from zbpp import Costs, lower, plan, simulate
from zbpp.features.activation_offload.copies import Await, Drop, Fetch, Offload, with_copies
from zbpp.schedule import Action, Op

NAMES = ["gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "interleaved_1f1b"]


def drawn_costs(seed, num_stages, host):
    rng = random.Random(seed)

    def numbers(low, high):
        return [rng.uniform(low, high) for _ in range(num_stages)]

    return Costs(
        f=numbers(1, 3), b=numbers(1, 3), w=numbers(1, 3), comm=rng.uniform(0, 1), host=numbers(*host)
    )


def ends_of(row, value):
    """The positions of the F that makes a value and of the B or BW that uses it."""
    places = [i for i, a in enumerate(row) if a[::2] == value[1:] and a.op != Op.W]
    assert value.name == "saved"
    made, used = places
    return made, used


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", [(0.1, 0.5), (1, 3), (4, 9)])
def test_what_is_chosen_makes_no_action_late_and_holds_no_more(name, host):
    """With drawn costs: every action starts when it starts without offload."""
    timetable = plan(name, 4, 8)
    costs = drawn_costs(name + str(host), timetable.num_stages, host)
    without = simulate(timetable, costs)
    offload = choose_offload(without, costs)
    timeline = with_offload(timetable, costs, offload)
    for before, after in zip(without.starts, timeline.starts, strict=True):
        np.testing.assert_allclose(after, before)
    assert all(
        after <= before for before, after in zip(without.peak_memory, timeline.peak_memory, strict=True)
    )
    assert any(offload) == bool(timeline.copies)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_makes_one_copy_at_a_time_and_each_instruction_waits_for_its_own(name, late):
    timetable = plan(name, 4, 8)
    costs = drawn_costs(name, timetable.num_stages, (1, 3))
    timeline = with_offload(timetable, costs, choose_offload(simulate(timetable, costs), costs, late=late))
    for rank in range(4):
        copies = [each for each in timeline.copies if each.rank == rank]
        assert all(first.end <= second.start for first, second in pairwise(copies))
        for each in copies:
            made, used = ends_of(timetable.rows[rank], each.value)
            assert each.start >= timeline.ends[rank][made]
            assert each.end <= timeline.starts[rank][used] + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_the_four_instructions_of_a_value_stand_between_its_producer_and_its_consumer(name):
    timetable = plan(name, 4, 8)
    costs = drawn_costs(name, timetable.num_stages, (0.5, 2))
    for late in (False, True):
        offload = choose_offload(simulate(timetable, costs), costs, late=late)
        for rank, program in enumerate(map(with_copies, lower(timetable), offload)):
            places = {str(each): place for place, each in enumerate(program.instructions)}
            left = [each.value for each in program.instructions if isinstance(each, Offload)]
            assert len(left) == len(offload[rank]) / 4
            for value in left:
                row = timetable.rows[rank]
                made, used = ends_of(row, value)
                order = [row[made], Offload(value), Drop(value), Fetch(value), Await(value), row[used]]
                found = [places[str(each)] for each in order]
                assert found == sorted(found)
                between = program.instructions[found[2] : found[3]]
                assert any(isinstance(each, Action) for each in between)  # it is away while something runs


def test_the_first_rank_can_spare_all_where_round_trips_fit_beside_the_computation():
    """PipeOffload, arXiv:2503.01328: full offload is free where k <= 1."""
    timetable = plan("1f1b", 4, 16)
    for k, least, most in ((0.5, 16, 16), (1.0, 15, 16), (2.0, 1, 8)):  # of 16 microbatches
        costs = Costs(host=k * 3 / 2)  # F = B = W = 1
        chosen = choose_offload(simulate(timetable, costs), costs)
        assert least <= len(chosen[0]) / 4 <= most


def test_the_longest_lifespans_leave_first_under_a_limit():
    """In a V, rank 0's first stage waits longest for its B. A limit of one activation keeps the others."""
    timetable = plan("zb_v", 4, 8)
    costs = Costs(f=2, b=2, w=2, host=0.1)
    chosen = choose_offload(simulate(timetable, costs), costs, 1.0)[0]
    assert {each.instruction.value.stage for each in chosen} == {0}
    away = most = 0
    for each in chosen:
        away += isinstance(each.instruction, Offload) - isinstance(each.instruction, Await)
        most = max(most, away)
    assert most == 1


def test_late_copies_hold_the_peak_and_take_the_time():
    timetable, costs = plan("1f1b", 4, 8), Costs(f=2, b=2, w=2, host=10)
    without = simulate(timetable, costs)
    free, late = (
        with_offload(timetable, costs, choose_offload(without, costs, late=late)) for late in (False, True)
    )
    assert free.makespan == without.makespan < late.makespan
    assert late.peak_memory[1] <= without.peak_memory[1]


def test_without_a_host_nothing_leaves():
    timetable = plan("zb_v", 2, 4)
    assert choose_offload(simulate(timetable), Costs()) == [(), ()]


def test_an_action_without_a_duration_has_no_drop_before_its_copy(first_seed):
    """A W that exchanges have hidden takes no time at its place, where a copy may begin and end, too."""
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = Costs(f=2, b=2, w=rng.choice((0, 1)), host=rng.uniform(0.1, 3), exchange=1)
        offload = choose_offload(simulate(timetable, costs), costs, late=True)
        for placed in offload:
            left = set()
            for each in placed:
                value = each.instruction.value
                assert not isinstance(each.instruction, Drop) or value in left, f"seed {seed}"
                left.add(value)
        with_offload(timetable, costs, offload)  # each wait has its copy
