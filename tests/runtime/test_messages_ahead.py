"""More messages under way: the same values on each link, later waits, the same bits."""

from collections import Counter

import pytest
import torch

from helpers.processes import run_ranks
from helpers.toy_lm import ToyLm, batch
from zbpp import MessagesAhead, Pipeline, lower, plan
from zbpp.features.messages_ahead.messages_ahead import with_more_in_flight
from zbpp.schedule import Post, Release
from zbpp.schedule.passes.posts import in_flight


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


def test_a_number_below_1_is_refused():
    with pytest.raises(ValueError, match="write how many messages more, from 1"):
        MessagesAhead(0)
