"""The simulator against a naive one, its errors, and memory by hand."""

import random

import pytest

from helpers.timetables import random_timetable
from zbpp.planning import plan
from zbpp.schedule import Costs, Op, PlanError, Timetable, lower, simulate

F, B, W, BW = Op.F, Op.B, Op.W, Op.BW


def naive_starts(timetable, costs):
    """Raise start times until nothing changes any more: slow, and with no order of events at all."""
    duration = {F: costs.f, B: costs.b, W: costs.w, BW: costs.bw}
    backward_op = {action[::2]: action.op for row in timetable.rows for action in row if action.op in (B, BW)}
    start = {action: 0.0 for row in timetable.rows for action in row}

    def end(stage, op, microbatch):
        return start[stage, op, microbatch] + duration[op][stage]

    def message(source, target):
        same = timetable.rank_of[source] == timetable.rank_of[target]
        return 0.0 if same else costs.comm[source]

    def earliest(action):
        stage, op, microbatch = action
        if op == F:
            return end(stage - 1, F, microbatch) + message(stage - 1, stage) if stage else 0.0
        if op == W:
            return end(stage, B, microbatch)
        if stage == timetable.num_stages - 1:
            return end(stage, F, microbatch)
        above = end(stage + 1, backward_op[stage + 1, microbatch], microbatch)
        return max(end(stage, F, microbatch), above + message(stage + 1, stage))

    changed = True
    while changed:
        changed = False
        for row in timetable.rows:
            free = 0.0
            for action in row:
                later = max(free, earliest(action))
                changed |= later != start[action]
                start[action] = later
                free = end(*action)
    return [[start[action] for action in row] for row in timetable.rows]


def random_costs(rng, num_stages):
    def numbers(smallest):
        return [rng.uniform(smallest, 10) for _ in range(num_stages)]

    return Costs(f=numbers(1), b=numbers(1), w=numbers(1), bw=numbers(1), comm=numbers(0))


def test_simulate_agrees_with_a_naive_fixpoint(first_seed):
    for seed in range(first_seed, first_seed + 200):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = random_costs(rng, timetable.num_stages)
        timeline = simulate(timetable, costs)
        for mine, naive in zip(timeline.starts, naive_starts(timetable, costs), strict=True):
            assert mine.tolist() == naive, f"seed {seed}"


def test_the_figures_of_a_timeline_are_those_drawn_by_hand():
    """
    rank 0   F0 .. .. BW0-
    rank 1      F0 BW0         with a message of half a ms each way
    """
    timeline = simulate(Timetable.parse("0F0 0BW0\n1F0 1BW0"), Costs(f=1, b=1, w=0, comm=0.5))
    assert [start.tolist() for start in timeline.starts] == [[0, 4], [1.5, 2.5]]
    assert [end.tolist() for end in timeline.ends] == [[1, 5], [2.5, 3.5]]
    assert (timeline.makespan, timeline.max_span, timeline.span(1)) == (5, 5, 2)
    assert (timeline.idle(0), timeline.idle(1)) == (3, 0)
    assert (timeline.bubble, timeline.bubble_rate) == (3, 3 / 5)


def test_forward_only_can_be_simulated():
    """
    rank 0   0F0 0F1 0F2 3F0 ... 3F1 ... 3F2
    rank 1       1F0 2F0 1F1 2F1 1F2 2F2
    """
    timeline = simulate(plan("zb_v", 2, 3).forward_only())
    assert timeline.makespan == 8
    assert timeline.peak_memory == (6, 6)


def test_the_peak_memory_is_the_highest_level_after_an_action():
    """F +saved, B -saved +deferred, W -deferred, BW -saved; the highest level after an action."""
    timetable = Timetable.parse("0F0 0F1 0B0 0B1 0W0 0F2 0W1 0BW2")
    #                level:       4   8   7   6   3   7   4   0
    assert simulate(timetable, Costs(saved=4, deferred=3)).peak_memory == (8,)
    #                            4   8  15  22  11  15   4   0      deferred above saved: the peak is in B
    assert simulate(timetable, Costs(saved=4, deferred=11)).peak_memory == (22,)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "0F0 0B0 0W0\n1B0 1W0 1F0",
            "the timetable cannot proceed: rank 0 waits in 0B0 for g(0,0); "
            "rank 1 waits in 1B0 for g(1,0), saved(1,0)",
        ),
        (
            "3F0 0F0 0BW0 3BW0\n1F0 2F0 2BW0 1BW0",
            "the timetable cannot proceed: rank 0 waits in 3F0 for x(3,0); rank 1 waits in 1F0 for x(1,0)",
        ),
        ("0F0 0W0 0B0", "the timetable cannot proceed: rank 0 waits in 0W0 for deferred(0,0)"),
        ("0F0 0F0 0BW0", "0F0 repeats: a stage has one F per microbatch"),
        ("0F0 0BW0 0B0 0W0", "0B0 repeats: a stage has one B or BW per microbatch"),
        ("0F0 0B0 0BW0", "0B0 repeats: a stage has one B or BW per microbatch"),
        ("0F0 0BW0 0W0", "0W0 repeats: a stage has one W or BW per microbatch"),
        ("0F0 0F2 0BW0 0BW2", "0F1 is missing: a stage has one F per microbatch"),
        ("0F0 0F1 0BW0", "0B1 is missing: a stage has one B or BW per microbatch"),
        ("0F0 0B0", "0W0 is missing: a stage has one W or BW per microbatch"),
        ("0B0 0W0", "0F0 is missing: a stage has one F per microbatch"),
        ("0F0 0BW0\n1F0 1F1 1BW0 1BW1", "0F1 is missing: a stage has one F per microbatch"),
        ("0F2000000000", "0F0 is missing: a stage has one F per microbatch"),
        (
            "0F1 0F0 0BW0 0BW1",
            "0F0 comes after 0F1: F of a stage must ascend in microbatch, "
            "so that gradients are always summed in the same order",
        ),
        (
            "0F0 0F1 0B1 0BW0 0W1",
            "0B0 comes after 0B1: B or BW of a stage must ascend in microbatch, "
            "so that gradients are always summed in the same order",
        ),
        (
            "0F0 0F1 0B0 0BW1 0W0",
            "0W0 comes after 0W1: W or BW of a stage must ascend in microbatch, "
            "so that gradients are always summed in the same order",
        ),
        ("0F0 0BW0\n1F0", "stage 1 has no backward, but stage 0 has one"),
    ],
)
def test_a_timetable_that_cannot_run_says_why(text, message):
    with pytest.raises(PlanError) as caught:
        simulate(Timetable.parse(text))
    assert str(caught.value) == message


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["f", "b", "w", "bw", "comm", "saved", "deferred"])
def test_costs_are_finite_and_not_negative(name, number):
    for value in (number, [1.0, number]):
        with pytest.raises(PlanError, match=rf"Costs\({name}=.*must be finite and not negative"):
            Costs(**{name: value})


@pytest.mark.parametrize("value", ["ten", object(), [1, None], [[1, 2], [3, 4]]])
def test_a_cost_is_a_number_or_a_list_of_numbers(value):
    with pytest.raises(PlanError, match="a cost is a number or one number per stage"):
        Costs(f=value)


def test_a_list_of_costs_has_one_number_per_stage():
    with pytest.raises(PlanError, match="Costs: b has 3 numbers for 4 stages"):
        simulate(plan("1f1b", 4, 4), Costs(b=(1, 2, 3)))


def test_bw_takes_b_and_w_unless_it_is_given():
    """A list plus a list is a sum, not a longer list."""
    timetable = Timetable.parse("0F0 0BW0\n1F0 1BW0")
    assert simulate(timetable, Costs(f=0, b=[1, 2], w=[3, 4])).makespan == 10
    assert simulate(timetable, Costs(f=0, b=[1, 2], w=[3, 4], bw=1)).makespan == 2


def test_plans_at_scale_have_the_instructions_that_they_should():
    """How long it takes, with 512 ranks and 4096 microbatches, too, says `planner_eval.py scale`."""
    for name, num_instructions in (("zb_h1", 144_292), ("zb_v", 288_677)):
        timetable = plan(name, 32, 512)
        assert simulate(timetable).bubble_rate < 0.03
        assert sum(len(program.instructions) for program in lower(timetable)) == num_instructions
