"""Messages over links that they occupy, against a simulation of events that is written out by hand."""

import heapq
import json
import random
from dataclasses import replace

import pytest

from helpers.links import random_costs
from helpers.timetables import makes, needs, random_timetable
from zbpp import Costs, Links, PlanError, Timetable, lower, plan, simulate
from zbpp.planning import lower_bound
from zbpp.schedule import Op
from zbpp.schedule.interpret.timing import program_timeline
from zbpp.schedule.interpret.transmissions import transmissions
from zbpp.schedule.timeline import transfers_of


def by_events(timetable, costs, lengths):
    """Events are actions that end, and messages that arrive.

    (makespan, {value: when it arrives}, {(sender, receiver): {value: when it occupies the link, from, to}}).
    """
    rank_of, number, links = timetable.rank_of, timetable.num_stages, costs.links
    rows = [list(row) for row in timetable.rows]
    at, arrived, free, events, end, count = [0] * len(rows), {}, {}, [], 0.0, 0
    occupied = {}
    running = [False] * len(rows)

    def start(rank, now):
        nonlocal count
        if running[rank] or at[rank] == len(rows[rank]):
            return
        action = rows[rank][at[rank]]
        if all(each in arrived for each in needs(action)):
            time = {Op.F: costs.f, Op.B: costs.b, Op.W: costs.w, Op.BW: costs.bw}[action.op][action.stage]
            running[rank], count = True, count + 1
            heapq.heappush(events, (now + time * lengths[action.microbatch], count, rank, action))

    for rank in range(len(rows)):
        start(rank, 0.0)
    while events:
        now, _, rank, what = heapq.heappop(events)
        if isinstance(what, str):
            arrived[what] = now
            start(rank, now)
            continue
        end, running[rank] = max(end, now), False
        at[rank] += 1
        for value in makes(what, number):
            name, stage = value[: value.index("(")], int(value[value.index("(") + 1 : value.index(",")])
            to = rank_of[stage]
            if to == rank:
                arrived[value] = now
                continue
            length = lengths[what.microbatch]
            latency, busy = links.pairs.get((rank, to), (links.latency, links.busy))
            comm = costs.comm if isinstance(costs.comm, float) else costs.comm[what.stage]
            card = card_of(links, rank, to)
            gone = max(now, free.get(card, 0.0)) + busy * getattr(links, name) * length
            if latency + busy * getattr(links, name) > 0:
                begins = max(now, free.get(card_of(links, rank, to), 0.0))
                occupied.setdefault((rank, to), {})[value] = (begins, gone)
            free[card], count = gone, count + 1
            heapq.heappush(events, (gone + latency + comm * length, count, to, value))
        start(rank, now)
    return end, arrived, occupied


def card_of(links, rank, to):
    """The card over which messages leave: that of the rank, or one of this link alone."""
    is_shared = links.shared is True or (links.shared and (rank, to) in links.shared)
    return rank if is_shared and links.of(rank, to)[1] > 0 else (rank, to)


@pytest.mark.parametrize("is_even", [True, False])
def test_actions_and_messages_take_the_times_of_a_simulation_by_events(first_seed, is_even):
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = random_costs(rng, timetable)
        lengths = [1.0 if is_even else rng.uniform(0.1, 2) for _ in range(timetable.num_microbatches)]
        timeline = simulate(timetable, costs if is_even else Costs.of_lengths(lengths, costs))
        end, arrived, occupied = by_events(timetable, costs, lengths)
        assert timeline.makespan == pytest.approx(end, rel=1e-12), f"seed {seed}"
        for each in transfers_of(timeline):
            assert each.arrived == pytest.approx(arrived[str(each.value)], rel=1e-12), f"seed {seed}"
        shown = transmissions(timeline, costs)
        assert shown.keys() == occupied.keys(), f"seed {seed}"
        for link, messages in shown.items():
            assert [str(each.value) for each in messages] == [*occupied[link]], f"seed {seed}"
            for each, expected in zip(messages, occupied[link].values(), strict=True):
                assert each[1:3] == pytest.approx(expected, rel=1e-12), f"seed {seed}"
                assert each.arrived == pytest.approx(arrived[str(each.value)], rel=1e-12), f"seed {seed}"


def test_programs_take_the_times_that_simulate_gives_to_the_last_bit(first_seed):
    for seed in range(first_seed, first_seed + 50):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = random_costs(rng, timetable)
        expected, found = simulate(timetable, costs), program_timeline([*lower(timetable)], costs)
        for mine, simulated in zip(found.ends, expected.ends, strict=True):
            assert mine.tolist() == simulated.tolist(), f"seed {seed}"
        pairs = zip(transfers_of(found), transfers_of(expected), strict=True)
        assert all(one.value == other.value for one, other in pairs), f"seed {seed}"
        arrived = [[each.arrived for each in transfers_of(timeline)] for timeline in (found, expected)]
        assert arrived[0] == pytest.approx(arrived[1], rel=1e-12), f"seed {seed}"


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
def test_links_that_nothing_occupies_are_comm_to_the_last_bit(name):
    timetable = plan(name, 4, 8)
    by_comm = simulate(timetable, Costs(2, 3, 1, comm=0.7))
    by_links = simulate(timetable, Costs(2, 3, 1, links=Links(latency=0.7)))
    assert [each.tolist() for each in by_links.ends] == [each.tolist() for each in by_comm.ends]


def test_links_that_are_not_there_and_measured_steps_show_no_messages_on_links():
    timetable = plan("1f1b", 2, 2)
    timeline = simulate(timetable, Costs(links=Links(busy=1.0)))
    assert transmissions(timeline, Costs(comm=1.0)) == {}
    assert transmissions(replace(timeline, delays=()), Costs(links=Links(busy=1.0))) == {}
    assert [*transmissions(timeline, Costs(links=Links(pairs={(1, 0): (1.0, 0.0)})))] == [(1, 0)]


def test_two_messages_by_hand():
    """Two F's of 1 ms; a link that is busy for 3 ms, then 2 ms on the way: at 1 + 3 + 2 and 4 + 3 + 2."""
    timetable = Timetable.parse("0F0 0F1 0BW0 0BW1\n1F0 1F1 1BW0 1BW1")
    timeline = simulate(timetable, Costs(1, 1, 1, bw=1, links=Links(pairs={(0, 1): (2.0, 3.0)})))
    assert timeline.starts[1].tolist() == [6, 9, 10, 11]
    assert timeline.starts[0].tolist() == [0, 1, 11, 12]


@pytest.mark.parametrize(
    ("shared", "begins"), [(False, 8), (True, 11), ([(1, 0), (1, 2)], 11), ([(1, 0)], 8)]
)
def test_messages_to_two_ranks_over_one_card_by_hand(shared, begins):
    """Rank 1 makes x's for rank 2 at 2, 3 and 4, and at 8 a g for rank 0; each is busy for 3."""
    rows = ("0F0 0F1 0F2 0BW0 0BW1 0BW2", "1F0 1F1 1F2 1BW0 1BW1 1BW2", "2F0 2BW0 2F1 2BW1 2F2 2BW2")
    links = Links(pairs={(1, 0): (0.0, 3.0), (1, 2): (0.0, 3.0)}, shared=shared)
    costs = Costs(1, 1, 1, bw=1, links=links)
    found = transmissions(simulate(Timetable.parse("\n".join(rows)), costs), costs)
    assert [each.start for each in found[1, 2]] == [2, 5, 8]
    assert found[1, 0][0].start == begins


def test_slices_and_lengths_scale_what_a_link_carries_and_not_its_latency():
    links, sliced = Links(latency=5.0, busy=4.0), plan("1f1b", 2, 1, num_slices=4)
    first, *_ = transfers_of(simulate(sliced, Costs(links=links)))
    assert first.arrived - first.sent == 5 + 4 / 4
    long = Costs.of_lengths([3.0], Costs(links=links))
    first, *_ = transfers_of(simulate(plan("1f1b", 2, 1), long))
    assert first.arrived - first.sent == 5 + 4 * 3


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_an_empty_microbatch_sends_nothing_and_takes_no_time(name):
    """It waits for no link that is occupied, and for no latency, before the others or after them."""
    costs, full = Costs(links=Links(latency=5.0, busy=3.0)), [1.0, 2.0, 0.5, 1.0]
    expected = simulate(plan(name, 3, 4), Costs.of_lengths(full, costs)).makespan
    for lengths in ([0.0, 0.0, *full], [*full, 0.0]):
        timetable, own = plan(name, 3, len(lengths)), Costs.of_lengths(lengths, costs)
        timeline = simulate(timetable, own)
        assert timeline.makespan == expected
        empty = [each for each in transfers_of(timeline) if not lengths[each.value.microbatch]]
        assert empty
        assert all(each.arrived == each.sent for each in empty)
        least = lower_bound("makespan", rank_of=range(3), num_microbatches=len(lengths), costs=own)
        assert least.value <= expected


def test_bytes_and_bandwidths_make_the_same_links():
    """125 MB at 10 Gbit/s, 1.25 GB/s, take 100 ms; gradients of half the bytes take 50."""
    links = Links.of_bytes(125e6, 62.5e6, bandwidth=1.25, latency=1.0, pairs={(0, 1): (30.0, 0.125)})
    routes = links.routes([0, 1, 2])
    f, b = [each for each in routes if each is not None][:2]  # x from rank 0; x from rank 1
    assert (f.receiver, f.latency, f.busy) == (1, 30.0, pytest.approx(1000))
    assert (b.receiver, b.latency, b.busy) == (2, 1.0, pytest.approx(100))
    assert {round(each.busy, 6) for each in routes if each is not None} == {1000, 100, 50}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links(latency=-1), "latency=-1: write a number of 0 or more"),
        (lambda: Links(busy="3"), "busy='3'"),
        (lambda: Links(latency=10**400), "write a number of 0 or more, at most 1e100"),
        (lambda: Links.of_bytes(1.0, bandwidth=1e-200), "busy=1e.194: write a number of 0 or more, at most"),
        (
            lambda: Links.of_bytes(1.0, bandwidth=1, pairs={(0, 1): 3}),
            r"\(latency, bandwidth\)., in ms and GB/s",
        ),
        (lambda: Links(shared=[(1, 1)]), r"shared has \(1, 1\): a rank sends itself nothing"),
        (lambda: Links(shared=["ab"]), r"shared has 'ab': write True, or pairs of ranks"),
        (lambda: Links(shared=None), "shared has None: write True, or pairs of ranks"),
        (
            lambda: simulate(plan("1f1b", 2, 2), Costs(links=Links(shared=[(1, 2)]))),
            r"shared has \(1, 2\), and there are 2 ranks",
        ),
        (lambda: Links(pairs={(1, 1): (0, 0)}), r"pairs has \(1, 1\): a rank sends itself nothing"),
        (lambda: Links(pairs={(0, 1): 3.0}), r"pairs has \(0, 1\): 3.0: write \{\(sender, receiver\)"),
        (lambda: Links(pairs=[[0, 1], [1, 0]]), r"write \{\(sender, receiver\): \(latency, busy\)\}"),
        (lambda: Links.of_bytes(1e6, bandwidth=0), "bandwidth=0: a link carries some bytes"),
        (lambda: Costs(links=3.0), r"links=3.0: write links=zbpp.Links"),
        (
            lambda: simulate(plan("1f1b", 2, 2), Costs(links=Links(pairs={(1, 2): (1.0, 1.0)}))),
            r"pairs has \(1, 2\), and there are 2 ranks",
        ),
        (
            lambda: simulate(plan("1f1b", 2, 2), Costs(links=Links(x=[1.0, 2.0, 3.0]))),
            "x has 3 numbers for 2 stages",
        ),
    ],
)
def test_what_is_no_link_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_the_page_has_the_arrivals():
    from zbpp.render.page import _data

    timetable, costs = plan("zb_h1", 3, 3), Costs(links=Links(latency=1.0, busy=2.0))
    timeline = simulate(timetable, costs)
    data = json.loads(json.dumps(_data(timeline, costs, None)))
    assert data["ranks"][0]["delays"] == [round(each, 6) for each in timeline.delays[0].tolist()]
