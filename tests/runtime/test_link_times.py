"""Links measured: those that EMULATED slow links were set to, and which of them a plan hears of."""

import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Costs, Links, plan, simulate
from zbpp.benchmark.delayed_links import delayed_links
from zbpp.measure import link_times
from zbpp.measure.link_times import NEGLIGIBLE, fitted, timed_links, with_links
from zbpp.planning import read_costs, written_links

P, NBYTES = 3, 2**20
# (latency, busy) in ms, so far apart that a busy machine can't mix them up; the pair 1, 2 is fast.
SLOW = {(0, 1): (90.0, 30.0), (1, 0): (20.0, 90.0)}


def measured(rank):
    """The links, and as they look to ranks on hosts of their own, whose clocks are minutes apart."""
    own_host = patch.object(socket, "gethostname", lambda: f"host{rank}")
    own_clock = patch.object(link_times, "_now", lambda: time.perf_counter() * 1e3 + 1e5 * rank)
    found = []
    with delayed_links(Links(0.0, 0.0, SLOW), NBYTES):
        for patches in ((), (own_host, own_clock)):
            with ExitStack() as stack:
                for each in patches:
                    stack.enter_context(each)
                sizes = (NBYTES, NBYTES // 2)
                found.append(timed_links(plan("1f1b", P, 4), sizes, torch.device("cpu"), 60.0))
    return found


def test_the_latency_and_bandwidth_of_each_direction_are_found_and_fast_links_are_left_out(tmp_path):
    tables, *others = run_ranks(measured, P)
    assert others == [tables] * (P - 1)
    mean = sum(latency for latency, _ in SLOW.values()) / 2
    for table, usual in zip(tables, (None, mean), strict=True):
        assert sorted(table) == [(0, 1), (1, 0), (1, 2), (2, 1)]
        costs = with_links(Costs(f=[4e3] * P, b=[5e3] * P, w=6e3, comm=7.0), table, NBYTES, NBYTES // 2)
        assert sorted(costs.links.pairs) == [(0, 1), (1, 0)]
        for pair, (latency, busy) in SLOW.items():
            found_latency, per_byte = costs.links.pairs[pair]
            assert 0.5 < found_latency / (latency if usual is None else usual) < 2
            assert 0.5 < per_byte * NBYTES / busy < 2
        assert costs.comm == [0.0] * P  # what it counted is in the links
    # The file of costs says the same, to plans for as many ranks.
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**costs.numbers, "links": written_links(costs.links)}))
    again = read_costs(file)[0].per_stage(P, P)
    assert again.links.pairs.keys() == costs.links.pairs.keys()
    file.write_text(json.dumps(costs.numbers))
    assert read_costs(file)[0].links is None  # a file from before
    timetable, without = plan("1f1b", P, 4), replace(costs, links=None)
    makespan, at_once = (simulate(timetable, each).makespan for each in (again, without))
    assert makespan == pytest.approx(simulate(timetable, replace(costs, w=[6e3] * P)).makespan)
    assert makespan > at_once + 100


def test_costs_stay_where_each_message_takes_less_than_a_hundredth_of_the_shortest_action():
    costs = Costs(f=[10.0, 12.0], b=[20.0, 20.0], w=[0.0, 30.0], comm=[0.3, 0.4])
    almost = NEGLIGIBLE * 10.0 * 0.99
    assert with_links(costs, {(0, 1): (almost / 2, almost / 2e6), (1, 0): (0.0, 1e-15)}, 10**6, 10) is costs
    slow = with_links(costs, {(0, 1): (0.1, 1e-9), (1, 0): (0.0, 1e-15)}, 10**6, 10).links
    assert sorted(slow.pairs) == [(0, 1), (1, 0)]  # both directions, since one counts
    assert slow.pairs[0, 1] == pytest.approx((0.1, 1e-9))
    assert (slow.x, slow.g, slow.of(1, 2)) == (10**6, 10, (0.0, 0.0))


def test_neither_latency_nor_time_per_byte_is_negative():
    assert fitted({100: 4.0, 200: 6.0, 400: 10.0}) == pytest.approx((2.0, 0.02))
    assert fitted({100: 1.0, 200: 4.0}) == pytest.approx((0.0, 900 / 50000))
    latency, per_byte = fitted({100: 3.0, 200: 1.0})
    assert (latency, per_byte * 200) == (2.0, pytest.approx(0, abs=1e-9))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"x": 1e6, "pairs": {"0->1": {"latency": 1}}}, "pairs has 0->1: .*no bandwidth; write GB/s"),
        ({"x": 1e6, "pairs": {"0->1": {"latency": 1, "bandwidth": 1}}}, "0->1 and lacks 1->0: write both"),
        ({"x": 1e6, "bandwidth": None}, "there is no bandwidth for every link"),
        ({"x": 1e6, "latency": 3}, "there is no bandwidth for every link"),
        ({"x": 1e6, "pairs": {"0<->1": {"bandwidth": 0}}}, "bandwidth=0: a link carries some bytes"),
        (3, 'write {"latency": 0.05'),
    ],
)  # fmt: skip
def test_links_of_a_costs_file_that_are_none_are_refused_in_a_line(tmp_path, links, message):
    (tmp_path / "costs.json").write_text(json.dumps({"f": 1, "links": links}))
    with pytest.raises(ValueError, match=f"costs.json: links: .*{message}") as caught:
        read_costs(tmp_path / "costs.json")
    assert "\n" not in str(caught.value)
