"""Planning over links that messages occupy: bounds below everything, brute force, and the search."""

import itertools
import json
import random

import pytest

from helpers.links import random_costs
from helpers.timetables import random_timetable
from zbpp import Costs, Links, PlanError, plan, simulate
from zbpp.planning import lower_bound, read_links, slowest_link


def bound(timetable, costs, objective, limit=None):
    counts = {"num_microbatches": timetable.num_microbatches, "num_slices": timetable.num_slices}
    return lower_bound(objective, rank_of=timetable.rank_of, costs=costs, memory_limit=limit, **counts)


def test_no_bound_is_above_a_random_timetable(first_seed):
    for seed in range(first_seed, first_seed + 150):
        rng = random.Random(seed)
        timetable = random_timetable(rng, num_slices=rng.choice((1, 1, 2)))
        costs = random_costs(rng, timetable)
        if rng.random() < 0.3:
            costs = Costs.of_lengths([rng.uniform(0.1, 2) for _ in range(timetable.num_microbatches)], costs)
        timeline = simulate(timetable, costs)
        for objective, value in (("makespan", timeline.makespan), ("span", timeline.max_span)):
            for limit in (None, timeline.peak_memory):
                least = bound(timetable, costs, objective, limit)
                assert least.value <= value * (1 + 1e-9), f"seed {seed}: {least}"


def test_the_bound_of_a_full_link_is_met():
    """F = B = W = 1, x takes 5 of the link: 1 + 8 * 5, then F and B on rank 1, B and W on rank 0."""
    costs = Costs(links=Links(pairs={(0, 1): (0.0, 5.0)}))
    found = plan("zb_auto", 2, 8, costs=costs, time_limit=2)
    least = bound(found, costs, "makespan")
    assert (least.value, least.argument) == (45, "work of the link from rank 0 to rank 1")
    assert simulate(found, costs).makespan == 45


def test_the_bound_of_a_card_that_two_links_share_is_met():
    """F = B = W = 1; from rank 1 x and g take 4 each: two F's, 8 messages, B and W on rank 0."""
    costs = Costs(links=Links(pairs={(1, 0): (0.0, 4.0), (1, 2): (0.0, 4.0)}, shared=True))
    found = plan("zb_h1", 3, 4)
    least = bound(found, costs, "makespan")
    assert least.argument == "work of the card of rank 1"
    assert least.value == 2 + 8 * 4 + 2
    assert simulate(found, costs).makespan == least.value


@pytest.mark.parametrize(("limit", "expected"), [(4.0, 1.938), (6.0, 1.5), (8.0, 1.312)])
def test_the_search_uses_memory_where_links_are_slow(limit, expected):
    """Each message is busy for 10 ms and on the way for 10: 1f1b takes 2.354 times the ideal step.

    F = B = W = 10 ms. expected: what a trial before this code found, in 1, 1.5 and 2 times 1F1B's memory; the
    last is optimal.
    """
    costs = Costs(10, 10, 10, links=Links(10.0, 10.0))
    families = [simulate(plan(name, 4, 16), costs).makespan / 480 for name in ("1f1b", "zb_h1")]
    assert families == pytest.approx([2.354, 2.0625], abs=1e-3)
    found = simulate(plan("zb_auto", 4, 16, costs=costs, memory_limit=limit, time_limit=5), costs)
    assert max(found.peak_memory) <= limit
    assert found.makespan / 480 <= expected * 1.01


def test_plans_without_links_stay_as_they_are():
    """Links of nothing plan what no links plan."""
    for name, limit in itertools.product(("zb_auto",), (4.0, None)):
        options = {"memory_limit": limit, "time_limit": 60, "search": False}
        one = plan(name, 4, 8, costs=Costs(comm=0.5), **options)
        assert plan(name, 4, 8, costs=Costs(comm=0.5, links=Links()), **options) == one


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"latency": 1, "busy": 2, "pairs": {"0<->1": {"busy": 3}, "1->2": {"latency": 4}}},
         Links(1, 2, {(0, 1): (1, 3), (1, 0): (1, 3), (1, 2): (4, 2)})),
        ({"busy": 1, "shared": ["0<->1", "1->2"]}, Links(busy=1, shared=[(0, 1), (1, 0), (1, 2)])),
        ({"bandwidth": 1, "x": 1e6, "shared": True}, Links.of_bytes(1e6, bandwidth=1, shared=True)),
        ({"latency": 1, "bandwidth": 2, "x": 4e6, "pairs": {"0->1": {"bandwidth": 1}}},
         Links.of_bytes(4e6, bandwidth=2, latency=1, pairs={(0, 1): (1, 1)})),
    ],
)  # fmt: skip
def test_a_file_of_links(tmp_path, given, expected):
    (tmp_path / "links.json").write_text(json.dumps(given))
    assert read_links(str(tmp_path / "links.json")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", 'write ."latency": 0.05'),
        ('{"latncy": 1}', "latncy is none of latency, busy, pairs, shared; did you mean latency"),
        ('{"bandwidth": 1}', "bandwidth goes with x"),
        ('{"bandwidth": 0, "x": 1e6}', "bandwidth=0: a link carries some bytes"),
        ('{"busy": 1, "pairs": {"1-2": {"busy": 1}}}', "pairs has 1-2: .*: write 1->2, or 1<->2, and"),
        ('{"busy": 1, "pairs": {"1->2": {"bandwidth": 1}}}', "bandwidth is none of latency, busy"),
        ('{"busy": 1, "shared": ["1-2"]}', 'shared=.*: write true, or a list such as ."1->2"'),
        ('{"busy": 1, "shared": 3}', "shared=3: write true, or a list such as"),
        ('{"busy": 1, "pairs": ["1->2"]}', "pairs=.*: write ..1->2.: {latency: ..., busy: ...}"),
        ('{"busy": [1', "it is no JSON"),
        ("[" * 100_000, "links.json: it is no JSON: maximum recursion depth"),
        ("9" * 5000, "links.json: it is no JSON: Exceeds the limit"),
        ("\udcff", "links.json: it is no JSON: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_no_file_of_links_is_refused_in_a_line(tmp_path, text, message):
    (tmp_path / "links.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanError, match=message):
        read_links(str(tmp_path / "links.json"))
    with pytest.raises(PlanError, match="there is no such file"):
        read_links("nowhere.json")


def test_the_slowest_link_is_that_at_whose_full_speed_the_step_is_shortest():
    """One microbatch: 4 F, then 4 BW of 2; x takes 5 + 2 and g 3 + 1 over the middle link, .5 elsewhere."""
    links = Links(latency=0.5, pairs={(1, 2): (5.0, 2.0), (2, 1): (3.0, 1.0)})
    found = slowest_link(plan("1f1b", 4, 1), Costs(links=links))
    assert found == (1, 2, 12 + 2 + 7 + 4, 12 + 2 + 4)
    assert str(found) == (
        "The step waits most for the link 1 -> 2: it takes 25 ms, and 18 ms with that link at full speed."
    )
    assert slowest_link(plan("1f1b", 4, 1), Costs(comm=1.0)) is None
    assert slowest_link(plan("1f1b", 1, 4), Costs(links=Links(latency=1.0))) is None
