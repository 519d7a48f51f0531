"""scripts/dev/ablate.py removes what it says it removes, and puts it back."""

import pytest

from scripts.dev import ablate, ablate_bounds, targets
from zbpp.planning.bounds import bound_of
from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.local_search import LocalSearch
from zbpp.schedule import Costs

ONE = Problem.placed(4, 12, costs=Costs(f=10, b=12, w=7, comm=1), memory_limit=5, objective="span")
V = Problem.placed(4, 12, costs=Costs(f=5, b=6, w=3, bw=8, comm=1), memory_limit=8, placement="v")


@pytest.mark.parametrize("component", ablate.components(), ids=lambda each: each.name)
def test_the_search_runs_without_a_component(component):
    """To a valid plan in a moment, whichever is missing."""
    assert component.lines or not component.code
    originals = [getattr(owner, name) for owner, name, _ in component.replaced]
    with component.removed():
        assert all(getattr(owner, name) is other for owner, name, other in component.replaced)
        for problem in (ONE, V):
            search = LocalSearch(problem, Deadline(0.1), seed=0)
            assert problem.value_of_plan(search.run()) <= search.best + problem.tolerance
    assert originals == [getattr(owner, name) for owner, name, _ in component.replaced]


@pytest.mark.parametrize("component", ablate_bounds.components(), ids=lambda each: each.name)
def test_a_bound_without_an_argument_is_no_higher(component):
    whole = [bound_of(problem).value for problem in (ONE, V)]
    with component.removed():
        without = [bound_of(problem).value for problem in (ONE, V)]
    assert all(less <= most * (1 + 1e-9) for less, most in zip(without, whole, strict=True))


def test_some_cells_are_easy_and_some_are_not():
    cells = list(targets.one_per_rank())
    assert {ablate.is_easy(cells[1]), ablate.is_easy(cells[3]), ablate.is_easy(cells[5])} == {True, False}
