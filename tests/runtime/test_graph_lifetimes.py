"""Which messages of captured steps may share memory: beside brute force, and beside what links really do."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.timetables import random_timetable
from zbpp import lower, plan
from zbpp.runtime.executor import Executor
from zbpp.runtime.graphs.lifetimes import Life, lives, share
from zbpp.runtime.graphs.messages import PlannedBuffers, static_messages
from zbpp.runtime.layout import TensorLayout
from zbpp.schedule import Op, consumes, produces

CPU = torch.device("cpu")
LIVES = st.lists(
    st.tuples(st.integers(-1, 30), st.integers(0, 12)).map(lambda at: Life(at[0], at[0] + at[1]))
)


@given(LIVES)
def test_memory_is_shared_by_lives_that_do_not_overlap_and_by_as_many_as_can(found):
    numbers = share(dict(enumerate(found)))
    for one, a in enumerate(found):
        for other, b in enumerate(found[:one]):
            meet = set(range(a.begin, a.end + 1)) & set(range(b.begin, b.end + 1))
            assert not meet or numbers[one] != numbers[other]
    most = max((sum(each.begin <= at <= each.end for each in found) for at in range(-1, 45)), default=0)
    assert len(set(numbers.values())) == most


class Link:
    """Stands for a process group of two ranks: notes when it gets memory, and when the memory is free."""

    def __init__(self, clock):
        self.clock, self.received, self.sent = clock, [], []

    def recv(self, tensors, peer, tag):
        self.received.append(self.clock())
        return SimpleNamespace(wait=lambda: None)

    def send(self, tensors, peer, tag):
        number = len(self.sent)
        self.sent.append(None)
        return SimpleNamespace(wait=lambda: self.sent.__setitem__(number, self.clock()))


def observed(program, timetable):
    """The lives of a rank's messages as its links and actions show them, in a run of the real executor."""
    layout, begins, ends, places = (TensorLayout(torch.float32, (1,), False),), {}, {}, []
    clock = lambda: len(places) - 1 - num_first  # noqa: E731  # the instruction that runs
    links = {pair: Link(clock) for pair in lower(timetable).links}

    def method(op):
        def act(stage, microbatch, message):
            action = next(a for a in program.instructions if a == (stage, op, microbatch))
            for value in consumes(action):
                ends[value] = clock()
            made = [each for each in produces(action, timetable.num_stages) if each.name in ("x", "g")]
            for value in made:
                begins[value] = clock()
            return (torch.zeros(1),) if made else ()

        return act

    flight = SimpleNamespace(begin=lambda _: places.append)
    stages = dict(enumerate(range(timetable.num_stages)))
    executor = Executor(
        program, stages, {op: method(op) for op in Op}, timetable.num_stages, links, CPU, flight=flight
    )
    num_first = len(executor._inboxes)
    for inbox in executor._inboxes.values():
        inbox.layouts = dict.fromkeys(inbox.channels, layout)
    for outbox in executor._outboxes.values():
        outbox.layouts = {(name, s): layout for name in "xg" for s in range(timetable.num_stages)}
    executor.run()
    for each in program.instructions:
        if type(each).__name__ == "Recv":
            begins[each.value] = max(-1, links[each.peer, program.rank].received.pop(0))
        elif type(each).__name__ == "Send":
            ends[each.value] = links[program.rank, each.peer].sent.pop(0)
    return begins, ends


@given(st.integers(0, 10**6))
def test_lives_are_those_of_the_links_and_of_the_actions_of_a_stage_and_microbatch(seed):
    """A message is read by its B, too, and by its W, which may hold the very tensor."""
    timetable = random_timetable(random.Random(seed))
    for program in lower(timetable):
        begins, ends = observed(program, timetable)
        last = {(a.stage, a.microbatch): at for at, a in enumerate(program.instructions) if hasattr(a, "op")}
        for value, life in lives(program, timetable.num_stages).items():
            assert life.begin == begins[value]
            taken = timetable.rank_of[value.stage] == program.rank
            end = (
                last[value.stage, value.microbatch] if taken else min(ends[value], len(program.instructions))
            )
            assert life.end == end


def test_buffers_are_given_out_in_the_order_of_the_link_and_refuse_another_layout():
    first, second = torch.zeros(2), torch.zeros(3)
    buffers = PlannedBuffers(CPU, [(first, None), (second,)])
    layouts = [TensorLayout(torch.float32, (size,), False) for size in (2, 3)]
    for _ in range(2):
        buffers.begin()
        assert [id(buffers.take(each)) for each in layouts] == [id(first), id(second)]
        buffers.begin()
        assert buffers.take(layouts[0]) is first
    with pytest.raises(ValueError, match="receives float32\\[3\\], but the message has float32\\[2\\]"):
        buffers.take(layouts[0])


def test_microbatches_that_are_never_alive_together_share_their_messages():
    """1F1B on the second of four ranks holds 4 microbatches at most, whatever their number."""
    timetable = plan("1f1b", 4, 32)
    program = lower(timetable)[1]
    layout = (TensorLayout(torch.float32, (1,), False),)
    layouts = dict.fromkeys(lives(program, timetable.num_stages), layout)
    messages = static_messages(program, timetable.num_stages, layouts, CPU)
    distinct = {id(tensor) for message in messages.values() for tensor in message}
    assert len(messages) == 4 * 32
    assert len(distinct) <= 12
