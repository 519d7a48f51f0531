"""A memory limit counts what a rank holds all the time: weights, gradients and optimizer states."""

import json
from itertools import chain, combinations

import pytest

from zbpp.planning import PlanningRequest, choose, plan, read_costs, read_memory_limit
from zbpp.planning.memory_limit import memory_text
from zbpp.planning.recompute import cheapest_recompute, with_recompute
from zbpp.schedule import Costs, PlanError, simulate
from zbpp.schedule.costs import BYTES

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
        first, second = choice.candidate.timeline.peak_memory
        assert (first <= 6 * GIB, second <= 4 * GIB) == (True, True)
    assert "zb_h2" in {each.name for each in answer.too_large}  # 3 activations and 4 GiB of weights


# ---------------------------------------------------------------- which stages recompute

SAVED, DEFERRED, KEPT, F = (
    [5.0, 3.0, 4.0, 6.0],
    [2.0, 1.0, 2.0, 2.0],
    [1.0, 1.0, 0.5, 1.0],
    [3.0, 1.0, 2.0, 1.5],
)


def variant(stages):
    costs = Costs(f=F, b=1.0, w=1.0, comm=0.2, saved=SAVED, deferred=DEFERRED, static=1.0)
    return with_recompute(costs, stages, 4, KEPT)


def subsets(items):
    return map(frozenset, chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "interleaved_1f1b"])
@pytest.mark.parametrize("limit", [8, 11, 14, 20, 40])
def test_the_chosen_stages_are_the_best_of_all_subsets(schedule, limit):
    num_ranks = 4 if schedule == "zb_h1" else 2
    timetable = plan(schedule, num_ranks, 6)

    def outcome(stages):
        timeline = simulate(timetable, variant(stages))
        return timeline.makespan, timeline.peak_memory

    def peak(rank, stages):
        return outcome(stages)[1][rank]

    fitting = [each for each in subsets(range(4)) if max(outcome(each)[1]) <= limit]
    arguments = timetable.rank_of, peak, lambda stages: outcome(stages)[0], [limit] * num_ranks, BYTES
    if not fitting:
        least = [
            memory_text(min(peak(rank, s) for s in subsets(range(4))), BYTES) for rank in range(num_ranks)
        ]
        with pytest.raises(PlanError, match=f"per rank: {', '.join(least)}"):
            cheapest_recompute(*arguments)
        return
    chosen = cheapest_recompute(*arguments)
    assert chosen in fitting
    assert outcome(chosen)[0] == min(outcome(each)[0] for each in fitting)
