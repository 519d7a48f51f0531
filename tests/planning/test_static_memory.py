"""A memory limit counts what a rank holds all the time: weights, gradients and optimizer states."""

import json

import pytest

from zbpp.planning import PlanningRequest, choose, plan, read_costs, read_memory_limit
from zbpp.schedule import Costs, simulate

GIB = 2**30


@pytest.mark.parametrize("placement", ["one", "v"])
def test_a_search_keeps_activations_and_static_memory_within_the_limit(placement):
    """The plan is that for a limit that is lower by the static memory."""
    limit = 5 if placement == "one" else 10
    costs = Costs(comm=0.1, static=100 if placement == "one" else 50)

    def search(costs, limit, time_limit):
        return plan(
            "zb_auto", 3, 6, costs=costs, memory_limit=limit, placement=placement, time_limit=time_limit
        )

    # Without time the search returns the best plan that it begins with, which no clock can change.
    assert search(costs, limit + 100, 0) == search(Costs(comm=0.1), limit, 0)
    assert max(simulate(search(costs, limit + 100, 0.2), costs).peak_memory) <= limit + 100


def test_a_costs_file_with_static_bytes_plans_for_a_real_device(tmp_path):
    numbers = {"f": [1, 1], "saved": [GIB] * 2, "deferred": [GIB // 2] * 2, "static": [4 * GIB, 2 * GIB]}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**numbers, "memory_unit": "bytes"}))
    costs, _ = read_costs(path)
    limit = read_memory_limit("6GiB,4GiB", costs)
    request = PlanningRequest(
        num_ranks=2, num_microbatches=6, costs=costs, memory_limit=limit, time_limit=0.5
    )
    answer = choose(request)
    assert answer.ranked
    for choice in answer.ranked:
        first, second = choice.timeline.peak_memory
        assert (first <= 6 * GIB, second <= 4 * GIB) == (True, True)
    assert "zb_h2" in {each.name for each in answer.too_large}  # 3 activations and 4 GiB of weights
