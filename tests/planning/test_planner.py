"""plan(): which options reach a generator, and what is refused with which words."""

import pytest

from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import Costs, PlanError, simulate


@pytest.fixture
def generator(monkeypatch):
    """Register a generator as "mine" for one test."""

    def register(function):
        monkeypatch.setitem(SCHEDULES, "mine", function)

    return register


def test_a_generator_gets_just_the_options_it_declares(generator):
    seen = []

    def mine(num_ranks, num_microbatches, *, costs, objective, seed, time_limit=None, progress=None):
        seen.append((costs, objective, seed, time_limit, progress))
        return plan("gpipe", num_ranks, num_microbatches)

    generator(mine)
    plan("mine", 2, 3)
    plan("mine", 2, 3, costs=Costs(f=3), objective="span", seed=7, time_limit=0.5, progress=print)
    assert seen == [(Costs(), "makespan", 0, 10.0, None), (Costs(f=3), "span", 7, 0.5, print)]


def test_a_generator_that_ignores_the_limit_is_caught(generator):
    def mine(num_ranks, num_microbatches, *, memory_limit=None):
        return plan("gpipe", num_ranks, num_microbatches)

    generator(mine)
    with pytest.raises(PlanError, match="mine needs 3 on rank 0, the memory limit allows 2"):
        plan("mine", 2, 3, memory_limit=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_ranks": 0}, "num_ranks=0: write a whole number, 1 or more"),
        ({"num_microbatches": -3}, "num_microbatches=-3: write a whole number, 1 or more"),
        ({"memory_limit": [8, 8, 8]}, "the memory limit is a list of length 3 for 2 ranks: write one"),
        ({"placement": "loop"}, "placement='loop': write one or looped or v"),
        ({"stages_per_rank": 0}, "stages_per_rank=0: write a whole number, 1 or more"),
        (
            {"placement": "v", "stages_per_rank": 3},
            "placement='v' and stages_per_rank=3 contradict each other: stages_per_rank must be 2, or left "
            "out",
        ),
        (
            {"placement": "looped", "stages_per_rank": 1},
            "placement='looped' and stages_per_rank=1 contradict each other: stages_per_rank must be 2 or "
            "more (one stage per rank is placement='one'), or left out",
        ),
        ({"placement": "v"}, "zb_h1 places its stages as 'one', not 'v': leave placement out"),
        ({"stages_per_rank": 2}, "zb_h1 has 1 stage(s) per rank, not 2: leave stages_per_rank out"),
        ({"memory_limit": 1.5}, "zb_h1 needs 2 on rank 0, the memory limit allows 1.5"),
    ],
)
def test_an_argument_that_will_not_do_is_refused_with_what_to_write(options, message):
    with pytest.raises(PlanError) as caught:
        plan("zb_h1", **{"num_ranks": 2, "num_microbatches": 4, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("zb_h3", "zb_h2"), ("ZB-H1", "zb_h1"), ("zbv", "zb_v"), ("interleaved", "interleaved_zb")],
)
def test_a_name_that_is_nearly_right_gets_a_suggestion(name, meant):
    with pytest.raises(PlanError, match=rf"unknown schedule '{name}'; known: .*; did you mean {meant}\?"):
        plan(name, 2, 4)


def test_the_papers_plans_hold_once_and_twice_the_memory_of_1f1b():
    costs = Costs(f=10, b=12, w=7, comm=1, saved=[3, 1, 2, 2])
    for name, multiple in (("zb_1p", 1), ("zb_2p", 2)):
        timetable = plan(name, 4, 12, costs=costs)
        limit = multiple * 4 * 3
        assert max(simulate(timetable, costs).peak_memory) <= limit
        assert timetable == plan("zb_auto", 4, 12, costs=costs, memory_limit=limit, search=False)
