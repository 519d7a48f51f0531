"""The search takes its dependencies from the data-flow table, and its own timing is the simulator's."""

import math
import random
from itertools import pairwise

import pytest

from helpers.timetables import makes, needs, random_placement
from zbpp.planning import plan
from zbpp.planning.problem import Problem, one_by_one
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.improve import move_at_random
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.planning.search.initial_orders import insert_weight_grads, split
from zbpp.planning.search.list_scheduling import first_rules, list_schedule, spare_times
from zbpp.planning.search.paper_planner import _Run
from zbpp.schedule import Action, Costs, Op, dataflow, dataflow_arrays, simulate
from zbpp.schedule.dataflow_arrays import op_of, producers, stage_of

COSTS = Costs(f=3, b=4, w=2, bw=5.5, comm=0.5)
FAMILIES = ["1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "interleaved_1f1b", "interleaved_zb", "looped_bfs"]


def problem_of(timetable, costs=COSTS):
    return Problem(timetable.rank_of, timetable.num_microbatches, costs)


def makespan(problem, rows):
    return simulate(problem.timetable_of(rows), problem.costs).makespan


# ---------------------------------------------------------------- the edges


@pytest.mark.parametrize("seed", range(30))
def test_messages_are_the_edges_between_stages(seed):
    """Against the table as it is written by hand in helpers/timetables."""
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 5)
    rank_of = tuple(random_placement(rng, num_ranks, rng.randint(num_ranks, 8)))
    problem = Problem(rank_of, 1, COSTS)
    actions = [Action(stage, op, 0) for stage in range(len(rank_of)) for op in Op]
    for kind, action in enumerate(actions):
        senders = {
            other
            for other, source in enumerate(actions)
            if source.stage != action.stage and set(makes(source, len(rank_of))) & set(needs(action))
        }
        assert set(problem.messages.senders[kind]) == senders
        assert {k for k, receivers in enumerate(problem.messages.receivers) if kind in receivers} == senders
        ranks = {rank_of[actions[sender].stage] for sender in senders}
        expected = 0.5 if ranks - {rank_of[action.stage]} else 0.0
        assert problem.messages.latency(kind, 1.0) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_the_feasible_range_of_an_action_is_what_the_table_says(name):
    """What the action waits for and what waits for it on its rank, and ascending microbatches: no more."""
    timetable = plan(name, 3, 6)
    problem = problem_of(timetable)
    timing = IncrementalTiming(problem, problem.plan_of(timetable))
    for row in timing.rows:
        before = {(a, b) for a in row for b in row if must_precede(problem, a, b)}
        for a in row:
            low = max((row.index(x) for x, y in before if y == a), default=-1) + 1
            high = min((row.index(y) for x, y in before if x == a), default=len(row)) - 1
            assert timing.feasible_range(a) == (low, high)


def must_precede(problem, a, b):
    (kind, microbatch), (other, next_microbatch) = (divmod(x, problem.num_microbatches) for x in (a, b))
    if microbatch == next_microbatch:
        return any(kind in kinds for kinds in producers(problem.num_stages)[other])
    together = ({Op.F}, {Op.B, Op.BW}, {Op.W, Op.BW})
    same = any({op_of(kind), op_of(other)} <= ops for ops in together)
    return stage_of(kind) == stage_of(other) and same and microbatch < next_microbatch


# ---------------------------------------------------------------- first orders


# ---------------------------------------------------------------- its own timing


@pytest.mark.parametrize("name", FAMILIES)
def test_the_search_times_a_plan_as_the_simulator_does(name):
    """From the start, and after hundreds of moves."""
    timetable = plan(name, 3, 9)
    problem = problem_of(timetable)
    timing = IncrementalTiming(problem, problem.plan_of(timetable))
    assert timing.value == makespan(problem, timing.rows)
    move_at_random(timing, random.Random(0), 500, Deadline(math.inf), goal=0.0)
    assert math.isclose(timing.value, makespan(problem, timing.rows))
    starts = [[timing.start(a) for a in row] for row in timing.rows]
    assert all(x <= y for row in starts for x, y in pairwise(row))


UNEQUAL = Costs.of_lengths(
    [0.5, 2, 0, 1, 1.5, 0.7],
    Costs(f=[3, 2, 3, 4], b=4, w=2, bw=5.5, comm=0.5, saved=[1, 2, 1, 1]),
    Costs(f=1, b=[2, 1, 2, 2], w=0),
)


@pytest.mark.parametrize("memory_limit", [None, 6])
@pytest.mark.parametrize("costs", [UNEQUAL, UNEQUAL.reordered([3, 1, 0, 5, 4, 2])])
def test_every_planner_times_unequal_microbatches_as_the_simulator_does(costs, memory_limit):
    problem = Problem((0, 1, 2, 3), 6, costs, memory_limit)
    timed = [(value, rows) for value, rows in own_times(problem) if value < math.inf]
    assert len(timed) > 3
    for value, rows in timed:
        assert math.isclose(value, makespan(problem, rows))
        assert problem.value_of_plan(rows) < math.inf  # within the limit
        timing = IncrementalTiming(problem, rows)
        move_at_random(timing, random.Random(0), 300, Deadline(math.inf), goal=0.0)
        assert math.isclose(timing.value, makespan(problem, timing.rows))
        assert problem.value_of_plan(timing.rows) < math.inf


def own_times(problem):
    """(its own makespan, plan) of each planner that keeps its own clock."""
    for rules in first_rules(problem):
        value, kinds = list_schedule(problem, spare_times(problem, 0.0), rules)
        yield value, problem.numbered(kinds)
    rows = one_by_one_split(problem)
    orders = [[a for a in row if op_of(a // problem.num_microbatches) != Op.W] for row in rows]
    for least_wait in (0.0, 0.5, 1.0):
        yield insert_weight_grads(problem, orders, least_wait)
    yield IncrementalTiming(problem, rows).value, rows


def one_by_one_split(problem):
    return split(problem, one_by_one(problem))


def unchanged(monkeypatch):
    monkeypatch.setattr(dataflow_arrays, "_values_of_size", dataflow_arrays.Values)  # else kept by size


def forwards_wait_for_nothing(monkeypatch):
    unchanged(monkeypatch)
    monkeypatch.setitem(dataflow._CONSUMES, Op.F, ())


def gradients_leave_with_w(monkeypatch):
    unchanged(monkeypatch)
    monkeypatch.setitem(dataflow._PRODUCES, Op.B, (("deferred", 0),))
    monkeypatch.setitem(dataflow._PRODUCES, Op.W, (("g", -1), ("done", 0)))


@pytest.mark.parametrize("change", [unchanged, forwards_wait_for_nothing, gradients_leave_with_w])
def test_every_planner_follows_a_changed_table(change, monkeypatch):
    """Each planner's own makespan is the simulator's, which asks the table; and it is another one."""
    before = [value for value, _ in own_times(Problem((0, 1, 2, 3), 6, COSTS, memory_limit=6))]
    change(monkeypatch)
    problem = Problem((0, 1, 2, 3), 6, COSTS, memory_limit=6)  # a problem takes its edges once
    timed = list(own_times(problem))
    for value, rows in timed:
        assert math.isclose(value, makespan(problem, rows))
    assert ([value for value, _ in timed] == before) == (change is unchanged)


@pytest.mark.parametrize("change", [unchanged, forwards_wait_for_nothing])
def test_the_papers_planner_follows_a_changed_table(change, monkeypatch):
    change(monkeypatch)
    problem = Problem((0, 1, 2, 3), 6, COSTS, memory_limit=6)
    run = _Run(problem, early=False, backward=False, lazy=False).run()
    assert math.isclose(max(run.clock), makespan(problem, run.plan()))
