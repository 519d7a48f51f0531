"""choose_cut: against all cuts, each simulated; limits; and the figures of a model with adapters."""

import math
import random
from dataclasses import replace
from importlib import import_module
from itertools import combinations, pairwise, permutations

import pytest

from zbpp import Costs, Links, PlanError, plan, simulate
from zbpp.planning import CutTooLarge, better_order, choose_cut, placement_of
from zbpp.schedule.families import FAMILIES


def drawn_layers(number, seed):
    rng = random.Random(seed)

    def drawn(low, high):
        return round(rng.uniform(low, high), 2)

    return [
        Costs(
            f=drawn(1, 4), b=drawn(1, 4), w=drawn(0, 3), comm=drawn(0, 1),
            saved=drawn(1, 2), deferred=drawn(0, 1), static=drawn(0, 5),
        )
        for _ in range(number)
    ]  # fmt: skip


def stage_costs(layers, cut, rank_of, speeds):
    """The costs of a cut, added up by hand."""
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    parts = [layers[start:end] for start, end in pairwise([0, *ends])]
    added = {name: [sum(getattr(each, name) for each in part) for part in parts] for name in MEMORY}
    for name in ("f", "b", "w"):
        added[name] = [
            sum(getattr(each, name) for each in part) / speeds[rank]
            for part, rank in zip(parts, rank_of, strict=True)
        ]
    return Costs(**added, comm=[part[-1].comm for part in parts], links=layers[0].links)


MEMORY = ("saved", "deferred", "static")


def best_by_hand(layers, speeds, num_microbatches, limits, placements):
    """The least makespan of all families under all cuts, one simulation each."""
    best = math.inf
    for name in FAMILIES:
        try:
            timetable = plan(name, len(speeds), num_microbatches)
        except PlanError:
            continue
        if placement_of(timetable) not in placements:
            continue
        num = timetable.num_stages
        for places in combinations(range(1, len(layers)), num - 1):
            cut = [end - start for start, end in pairwise([0, *places, len(layers)])]
            timeline = simulate(timetable, stage_costs(layers, cut, timetable.rank_of, speeds))
            if all(peak <= limit for peak, limit in zip(timeline.peak_memory, limits, strict=True)):
                best = min(best, timeline.makespan)
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("placements", [("one",), ("v",), ("one", "looped", "v")])
def test_the_cut_is_the_best_of_all_cuts_and_families(seed, placements):
    layers, speeds = drawn_layers(7, seed), [1, 2.5]
    found = choose_cut(layers, speeds, 4, placements=placements, time_limit=0)
    assert found.is_exact
    assert found.makespan == pytest.approx(best_by_hand(layers, speeds, 4, [math.inf] * 2, placements))
    own = stage_costs(layers, found.layers_per_stage, found.timetable.rank_of, speeds)
    assert simulate(found.timetable, own).makespan == pytest.approx(found.makespan)
    assert found.bound <= found.makespan * (1 + 1e-9)
    assert found.makespan <= found.even


@pytest.mark.parametrize(
    "links",
    [
        Links(latency=3.0),
        Links(latency=1.0, pairs={(0, 1): (6.0, 0.0)}),
        Links(latency=3.0, busy=3.0),
        Links(latency=1.0, busy=3.0, pairs={(0, 1): (6.0, 7.0)}),
        Links(latency=1.0, busy=3.0, shared=True),
    ],
)
def test_links_are_a_part_of_the_judgement(links):
    """The best of all cuts is found, also where messages wait for one another."""
    speeds = [1, 2.5]
    free = drawn_layers(7, 1)
    layers = [replace(each, links=links) for each in free]
    found = choose_cut(layers, speeds, 4, time_limit=0)
    best = best_by_hand(layers, speeds, 4, [math.inf] * 2, ("one", "looped", "v"))
    assert found.is_exact
    assert found.bound <= best == pytest.approx(found.makespan)
    with pytest.raises(PlanError, match="different links"):
        choose_cut([*layers[1:], free[0]], speeds, 4)


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_is_the_best_of_those_within_the_limits(seed):
    layers, speeds = drawn_layers(7, seed), [1, 2]
    free = choose_cut(layers, speeds, 4, time_limit=0)
    peaks = simulate(free.timetable, free.costs).peak_memory
    limits = [peak * 0.9 for peak in peaks]
    expected = best_by_hand(layers, speeds, 4, limits, ("one", "looped", "v"))
    if expected == math.inf:
        with pytest.raises(PlanError, match="memory limit allows"):
            choose_cut(layers, speeds, 4, limits, time_limit=0)
        return
    found = choose_cut(layers, speeds, 4, limits, time_limit=0)
    assert found.makespan == pytest.approx(expected)


def test_a_local_search_finds_the_best_of_all_cuts_where_these_are_too_many(monkeypatch):
    layers, speeds = drawn_layers(12, 7), [1, 3]
    exact = choose_cut(layers, speeds, 4, time_limit=0)
    monkeypatch.setattr(import_module("zbpp.planning.cut.choose_cut"), "MOST_CUTS", 5)
    found = choose_cut(layers, speeds, 4, time_limit=0)
    assert (exact.is_exact, found.is_exact) == (True, False)
    assert found.makespan == pytest.approx(exact.makespan)


def test_the_search_of_a_timetable_never_makes_the_answer_worse():
    layers, speeds = drawn_layers(8, 1), [1, 2]
    families = choose_cut(layers, speeds, 6, time_limit=0)
    searched = choose_cut(layers, speeds, 6, time_limit=0.5)
    assert searched.makespan <= families.makespan
    assert searched.bound <= searched.makespan * (1 + 1e-9)


def test_a_given_timetable_in_slices_is_judged_as_it_is_simulated():
    layers, speeds = drawn_layers(8, 3), [1, 2]
    timetables = {"zb_v": plan("zb_v", 2, 4, num_slices=2)}
    free = choose_cut(layers, speeds, 4, timetables=timetables, time_limit=0)
    timeline = simulate(free.timetable, free.costs)
    assert (free.schedule, free.makespan) == ("zb_v", pytest.approx(timeline.makespan))
    assert free.timetable.num_slices == 2
    choose_cut(layers, speeds, 4, timeline.peak_memory, timetables=timetables, time_limit=0)
    with pytest.raises(CutTooLarge) as caught:
        choose_cut(layers, speeds, 4, [1.0, 1.0], timetables=timetables, time_limit=0)
    least = caught.value.least
    assert caught.value.peaks == pytest.approx(simulate(least.timetable, least.costs).peak_memory)


def test_the_better_order_of_ranks_is_the_best_of_all_orders():
    layers, speeds, limits = drawn_layers(9, 5), [1, 1, 3], [60, 60, 90]
    timetables = {"1f1b": plan("1f1b", 3, 4)}
    given = choose_cut(layers, speeds, 4, limits, timetables=timetables, time_limit=0)
    order, found = better_order(given, layers, speeds, limits)
    every = [
        choose_cut(
            layers, [speeds[rank] for rank in each], 4, [limits[rank] for rank in each],
            timetables=timetables, time_limit=0,
        ).makespan
        for each in permutations(range(3))
    ]  # fmt: skip
    assert found.makespan == min(every) == every[[*permutations(range(3))].index(order)]
    assert found.makespan < given.makespan
    assert better_order(found, layers, [speeds[r] for r in order], [limits[r] for r in order]) is None
    assert better_order(given, layers, [1, 1, 1]) is None


# Llama-3-8B in 4 bits with adapters, 1024 tokens: ms and GB. Embedding, 32 layers, head.
LAYER = Costs(f=15, b=17.5, w=0.8, saved=0.172, deferred=0.138, static=0.143)
ADAPTERS = [
    Costs(f=0.2, b=0, w=0, saved=0, deferred=0, static=1.05),
    *[LAYER] * 32,
    Costs(f=36, b=37, w=0, saved=0.28, deferred=0, static=1.35),
]


@pytest.mark.parametrize(
    ("speeds", "even", "best"), [([1, 2], 1.50, 1.06), ([1, 1, 2, 2], 1.67, 1.20), ([1, 1, 1, 3], 1.77, 1.20)]
)
def test_ranks_of_unequal_speed_gain_what_was_found_elsewhere(speeds, even, best):
    """Step / ideal with eight microbatches: a trial's figures for an even cut and for its best one."""
    ideal = 8 * sum(each.f + each.b + each.w for each in ADAPTERS) / sum(speeds)
    found = choose_cut(ADAPTERS, speeds, 8, time_limit=0)
    assert found.makespan / ideal <= best
    assert even - 0.1 <= found.even / ideal <= even + 0.02


def test_among_cuts_of_equal_time_the_one_with_fewest_stages_and_least_memory_is_chosen():
    """On one rank each cut takes as long as all layers. Rounding chose (2, 6) and looped_bfs."""
    found = choose_cut([LAYER] * 8, [1], 4, time_limit=0)
    assert found.makespan == pytest.approx(4 * 8 * (LAYER.f + LAYER.b + LAYER.w))
    assert (found.layers_per_stage, found.placement) == ((8,), "one")
    assert max(simulate(found.timetable, found.costs).peak_memory) == pytest.approx(
        8 * (LAYER.saved + LAYER.static)
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speeds": []}, "speeds"),
        ({"speeds": [1, 0]}, "speeds"),
        ({"speeds": 2}, "speeds=2: write a number above 0 for each rank"),
        ({"layers": []}, "layers"),
        ({"layers": Costs()}, "a list with a Costs for each layer"),
        ({"layers": [15.0, 15.0]}, "a list with a Costs for each layer"),
        ({"layers": [Costs(f=[1, 2])]}, "layer 0"),
        ({"layers": [Costs()]}, "1 layers on 2"),
        ({"placements": ("w",)}, "placements"),
        (
            {"memory_limits": [1, 2, 3]},
            "the memory limit is a list of length 3 for 2 ranks: write one number",
        ),
        ({"memory_limits": 0.5}, "needs"),
        ({"num_microbatches": 0}, "num_microbatches"),
    ],
)
def test_what_can_not_be_cut_is_refused(changed, said):
    given = {"layers": [Costs()] * 6, "speeds": [1, 2], "num_microbatches": 4, "time_limit": 0, **changed}
    with pytest.raises(PlanError, match=said):
        choose_cut(**given)


def test_given_schedules_that_have_more_stages_than_layers_are_named():
    with pytest.raises(PlanError, match="^zb_v can't run 3 layers on 2 ranks"):
        choose_cut([Costs()] * 3, [1, 1], 4, timetables={"zb_v": plan("zb_v", 2, 4)})
