"""More messages under way: the same values on each link, later waits, the same bits."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from helpers.configs import SLOW_LINKS, composed
from helpers.links import random_costs
from helpers.processes import run_ranks
from helpers.timetables import random_timetable
from helpers.toy_lm import ToyLm, batch
from zbpp import Costs, Links, MessagesAhead, Pipeline, lower, plan, simulate
from zbpp.features.messages_ahead.messages_ahead import with_more_in_flight
from zbpp.planning import messages_ahead
from zbpp.run.plan import costs_of, messages_ahead_of
from zbpp.schedule import Action, Post, Release
from zbpp.schedule.passes.posts import in_flight
from zbpp.schedule.timeline import transfers_of


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_each_link_holds_more_and_carries_the_same(schedule):
    for program in lower(plan(schedule, 4, 8)):
        more = with_more_in_flight(program, 2)
        for kind in (Post, Release):
            before, after = ([each for each in in_flight(one).instructions if isinstance(each, kind)]
                             for one in (program, more))  # fmt: skip
            lost = Counter(each.peer for each in before) - Counter(each.peer for each in after)
            assert all(number == 2 for number in lost.values()) if kind is Release else not lost
            for peer in {each.peer for each in after}:
                own = [each for each in before if each.peer == peer]
                assert [each for each in after if each.peer == peer] == own[: len(own) - lost[peer]]
        assert most_posted(in_flight(more)) >= most_posted(in_flight(program))
        others = [each for each in program.instructions if not isinstance(each, Release)]
        assert [each for each in more.instructions if not isinstance(each, Release)] == others


def test_with_as_many_as_links_need_receives_start_in_time_and_no_release_waits(first_seed):
    """Simulated: a receive starts a way back before its send, a Release runs a way back after the arrival."""
    chosen = []
    for seed in range(first_seed, first_seed + 150):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        costs = random_costs(rng, timetable)
        number, timeline = messages_ahead(timetable, costs), simulate(timetable, costs)
        chosen.append(number)
        transfers = {each.value: each for each in transfers_of(timeline)}
        for rank, program in enumerate(lower(timetable)):
            ends, begun = timeline.ends[rank], 0
            for each in in_flight(with_more_in_flight(program, number)).instructions:
                begun += isinstance(each, Action)
                if isinstance(each, Post) and begun:
                    way_back, _ = costs.links.of(rank, each.peer)
                    assert ends[begun - 1] <= transfers[each.value].sent - way_back + 1e-9, f"seed {seed}"
                if isinstance(each, Release):
                    way_back, _ = costs.links.of(each.peer, rank)
                    assert ends[begun - 1] >= transfers[each.value].arrived + way_back - 1e-9, f"seed {seed}"
    assert len({*chosen}) > 3


def test_links_need_as_many_as_are_under_way_there_and_back():
    """F's of 10 ms; x is there after 25 ms, and its receive starts 25 ms before: six x's at once, not one."""
    timetable, costs = plan("gpipe", 2, 12), Costs(10, 10, 10)
    assert messages_ahead(timetable, replace(costs, links=Links(latency=25.0))) == 6 - 1
    assert messages_ahead(timetable, replace(costs, links=Links(pairs={(0, 1): (25.0, 0.0)}))) == 3 - 1
    assert messages_ahead(timetable, costs) == 0
    for name in ("1f1b", "zb_h1", "zb_v", "interleaved_1f1b"):  # a latency of a hundredth of an action
        assert messages_ahead(plan(name, 4, 8), replace(costs, links=Links(latency=0.1))) == 0


def test_a_run_takes_what_its_links_need_unless_the_config_says_a_number():
    for given, expected in (("null", 3), ("0", 0), ("2", 2)):
        config = composed("schedule=zb_v", "model=gpt_tiny", SLOW_LINKS, f"parallel.messages_ahead={given}")
        timetable = plan("zb_v", 2, 8)
        assert messages_ahead_of(config, timetable, costs_of(config.schedule, timetable)) == expected
    plain = composed("schedule=zb_v", "model=gpt_tiny")
    assert messages_ahead_of(plain, timetable, costs_of(plain.schedule, timetable)) == 0


def most_posted(program):
    """The most receives of one link that have started before the first action."""
    first = program.instructions.index(program.row[0])
    return max(Counter(each.peer for each in program.instructions[:first] if isinstance(each, Post)).values())


def trained(rank, extras):
    pipeline = Pipeline(ToyLm(), plan("zb_v", 2, 8), extras=extras)
    steps = [pipeline.step(inputs, target=target) for inputs, target in map(batch, range(3))]
    pipeline.close()
    return [each.item() for losses in steps for each in losses], [each.grad for each in pipeline.parameters()]


def test_no_bit_changes():
    plain, more = (run_ranks(trained, 2, extras) for extras in ([], [MessagesAhead(3)]))
    for without, ahead in zip(plain, more, strict=True):
        assert without[0] == ahead[0]
        assert all(map(torch.equal, without[1], ahead[1]))


def test_a_number_below_0_is_refused():
    with pytest.raises(ValueError, match="write how many messages more, from 0"):
        MessagesAhead(-1)
