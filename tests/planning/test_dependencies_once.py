"""Planning takes what waits for what from the data-flow table: a changed table changes every answer.

The search's own cases are in test_search_edges.
"""

import pytest

from zbpp.planning.bounds import lower_bound
from zbpp.planning.problem import Problem
from zbpp.schedule import Costs, Op, Timetable, dataflow, dataflow_arrays, simulate

COSTS = Costs(f=2, b=3, w=1, comm=0.5)
ONE_MICROBATCH = Timetable.parse("0F0 0B0 0W0\n1F0 1B0 1W0")


@pytest.fixture(autouse=True)
def values_follow_the_table(monkeypatch):
    monkeypatch.setattr(dataflow_arrays, "_values_of_size", dataflow_arrays.Values)  # else kept by size


@pytest.fixture
def gradients_leave_with_w(monkeypatch):
    """The stage below gets g from W instead of from B, so that a split saves no time."""
    monkeypatch.setitem(dataflow._PRODUCES, Op.B, (("deferred", 0),))
    monkeypatch.setitem(dataflow._PRODUCES, Op.W, (("g", -1), ("done", 0)))


@pytest.fixture
def forwards_wait_for_nothing(monkeypatch):
    monkeypatch.setitem(dataflow._CONSUMES, Op.F, ())


@pytest.fixture
def weight_gradients_wait_for_nothing(monkeypatch):
    monkeypatch.setitem(dataflow._CONSUMES, Op.W, ())


def bound():
    return lower_bound("makespan", rank_of=(0, 1, 2), num_microbatches=3, costs=COSTS).value


def optimum(rank_of=(0, 1, 2), num_microbatches=3, costs=COSTS):
    pytest.importorskip("ortools")
    from helpers.exact import solve

    best = solve(rank_of, num_microbatches, costs=costs)
    assert best.proved
    return best.value


def test_by_the_real_table_gradients_leave_with_b_and_w_comes_after_it():
    assert simulate(ONE_MICROBATCH).makespan == 5
    assert optimum(rank_of=(0, 1), num_microbatches=1, costs=Costs()) == 5
    assert bound() == pytest.approx(optimum()) == 28
    assert Problem((0, 1, 2), 3, COSTS).fill == [0, 2.5, 5]


@pytest.mark.usefixtures("gradients_leave_with_w")
def test_where_gradients_leave_with_w_a_split_saves_nothing():
    assert simulate(ONE_MICROBATCH).makespan == 6
    assert optimum(rank_of=(0, 1), num_microbatches=1, costs=Costs()) == 6
    assert bound() == pytest.approx(30)
    assert optimum() == 32


@pytest.mark.usefixtures("forwards_wait_for_nothing")
def test_where_forwards_wait_for_nothing_every_rank_starts_at_once():
    assert simulate(ONE_MICROBATCH).makespan == 4
    assert optimum(rank_of=(0, 1), num_microbatches=1, costs=Costs()) == 4
    assert bound() == pytest.approx(optimum()) == 23
    assert Problem((0, 1, 2), 3, COSTS).fill == [0, 0, 0]


@pytest.mark.usefixtures("weight_gradients_wait_for_nothing")
def test_where_w_waits_for_nothing_it_runs_before_its_b():
    assert simulate(Timetable.parse("0F0 0W0 0B0\n1F0 1B0 1W0")).makespan == 4
    assert optimum(rank_of=(0, 1), num_microbatches=1, costs=Costs()) == 4
