"""Where receives start, and that no wait for the whole device can hang a step whose actions may wait."""

import random
import sys
from collections import Counter, defaultdict, deque
from itertools import chain, count

import pytest

from helpers.timetables import random_timetable
from zbpp.features.post_validation.gate import PassGate, gate_of, with_gate
from zbpp.planning import plan
from zbpp.schedule import Action, Post, Recv, Release, Send, Timetable, lower
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.passes.posts import in_flight, one_ahead, unreceived, when_sent


def at_its_recv(program):
    """Each receive starts where its consumer needs it, and not where its sender waits for it."""
    pairs = ([Post(*each), each] if isinstance(each, Recv) else [each] for each in program.instructions)
    return program._replace(instructions=tuple(chain.from_iterable(pairs)))


class Devices:
    """Ranks whose hosts run ahead of their devices, by NCCL's rules.

    A device runs its rank's work in order. It does not wait where a send or receive starts; it waits where a
    value is taken, or a sent one is released. A send and a receive end once both have started; if sends are
    buffered, a send ends at once. An action in `waits` makes the host wait for all that it has started.
    Before it starts to receive a message of unknown layout, a host waits for the message's header.
    """

    def __init__(self, programs, waits, *, has_headers, is_buffered):
        self.waits, self.has_headers, self.is_buffered = waits, has_headers, is_buffered
        self.work = [list(self._work(program)) for program in programs]
        self.host, self.device = [0] * len(programs), [0] * len(programs)
        self.started = set()  # ("send" or "receive", link, number)

    def _work(self, program):
        """What a rank does: (kind, action or key)."""
        parts = 2 if self.has_headers else 1  # of a message
        sent, released, taken = (defaultdict(count) for _ in range(3))
        posted, due, is_behind_header = defaultdict(count), defaultdict(deque), Counter()

        def start_due(link):
            while due[link] and not is_behind_header[link]:
                is_behind_header[link] = self.has_headers
                yield "start", ("receive", link, due[link].popleft())

        for each in program.instructions:
            match each:
                case Send(_, peer):
                    link = program.rank, peer
                    first = parts * next(sent[link])
                    yield from (("start", ("send", link, first + part)) for part in range(parts))
                case Release(_, peer):
                    link = program.rank, peer
                    yield "device waits", ("send", link, parts * next(released[link]) + parts - 1)
                case Post(_, peer):
                    link = peer, program.rank
                    due[link].append(parts * next(posted[link]))
                    yield from start_due(link)
                case Recv(_, peer):
                    link = peer, program.rank
                    number = parts * next(taken[link])
                    if self.has_headers:
                        yield "host waits", ("receive", link, number)
                        number += 1
                        yield "start", ("receive", link, number)
                        is_behind_header[link] = 0
                        yield from start_due(link)
                    yield "device waits", ("receive", link, number)
                case Action() | PassGate(_):
                    yield "runs", each

    def run(self):
        """Run until nothing can go on. Returns where each rank is stuck; [] if all have ended."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.work)):
                while self._host_goes_on(rank) or self._device_goes_on(rank):
                    moved = True
        ends = zip(count(), self.host, self.work, strict=False)
        return [f"rank {rank}: {work[at]}" for rank, at, work in ends if at < len(work)]

    def _has_ended(self, key):
        kind, *message = key
        if kind == "send" and self.is_buffered:
            return key in self.started
        return {("send", *message), ("receive", *message)} <= self.started

    def _host_goes_on(self, rank):
        at = self.host[rank]
        if at == len(self.work[rank]):
            return False
        kind, what = self.work[rank][at]
        if kind == "host waits" and not self._has_ended(what):
            return False
        if isinstance(what, PassGate) or (kind == "runs" and what in self.waits):
            begun = [key for kind, key in self.work[rank][:at] if kind == "start"]
            # At a gate the host reads its part of the norm, which waits for the device's own work alone.
            is_idle = isinstance(what, PassGate) or all(map(self._has_ended, begun))
            if self.device[rank] < at or not is_idle or not self._may_pass(what):
                return False
        self.host[rank] += 1
        return True

    def _may_pass(self, what):
        """A gate opens when all hosts have come to theirs."""
        pairs = zip(self.host, self.work, strict=True)
        return not isinstance(what, PassGate) or all(
            ("runs", what) not in work[at + 1 :] for at, work in pairs
        )

    def _device_goes_on(self, rank):
        at = self.device[rank]
        if at == self.host[rank]:
            return False
        kind, what = self.work[rank][at]
        if kind == "device waits" and not self._has_ended(what):
            return False
        if kind == "start":
            self.started.add(what)
        self.device[rank] += 1
        return True


def stuck(timetable, posting, waits, *, has_headers=True, is_buffered=False, has_gate=False):
    """Where a step's ranks are stuck, if these actions wait for the whole device."""
    programs = lower(timetable)
    gated = [with_gate(each, gate_of(programs, each.rank)) if has_gate else each for each in programs]
    posted = [posting(program) for program in gated]
    return Devices(posted, waits, has_headers=has_headers, is_buffered=is_buffered).run()


def actions(timetable):
    return {action for row in timetable.rows for action in row}


def some(timetable, rng):
    """All actions of a timetable, or some of them."""
    share = rng.choice((0.1, 0.5, 1.0))
    return {action for action in sorted(actions(timetable)) if rng.random() <= share}


EVERY = [plan(name, num_ranks, 2 * num_ranks) for name in FAMILIES for num_ranks in (2, 3, 4)]


@pytest.mark.parametrize("has_headers", [True, False])
def test_no_order_of_waits_for_the_device_hangs_a_step_that_may_wait(has_headers, first_seed):
    """Every schedule, random timetables and placements; an evaluation and a step with gates, too."""
    num_tried = 0
    for seed in range(first_seed, first_seed + 120):
        rng = random.Random(seed)
        timetables = [random_timetable(rng), EVERY[seed % len(EVERY)]]
        for timetable in [*timetables, random_timetable(rng).forward_only()]:
            for is_buffered in (False, True):
                has_gate = timetable in timetables and rng.random() < 0.5
                options = {"has_headers": has_headers, "is_buffered": is_buffered, "has_gate": has_gate}
                found = stuck(timetable, when_sent, some(timetable, rng), **options)
                assert not found, (seed, str(timetable), options, found)
                num_tried += 1
    print(f"{num_tried} orders of waits tried")


@pytest.mark.parametrize("posting", [in_flight, one_ahead, at_its_recv])
def test_a_receive_that_starts_earlier_or_later_hangs_a_step_that_may_wait(posting):
    """As many receives ahead as are in flight, one ahead, or none until the consumer needs it."""
    hangs = [bool(stuck(each, posting, actions(each), has_headers=False)) for each in EVERY]
    assert sum(hangs) > len(EVERY) / 2
    if posting is at_its_recv:  # it is enough where a send ends before its receive has started
        assert not any(stuck(each, posting, actions(each), is_buffered=True) for each in EVERY)
    else:
        neighbours = {Action.parse("0F1"), Action.parse("1B0")}
        assert stuck(plan("zb_h1", 2, 4), posting, neighbours, has_headers=False)


@pytest.mark.parametrize("posting", [in_flight, one_ahead, when_sent])
def test_no_program_hangs_where_no_action_waits(posting, first_seed):
    for seed in range(first_seed, first_seed + 60):
        rng = random.Random(seed)
        for timetable in (random_timetable(rng), EVERY[seed % len(EVERY)]):
            for has_headers in (False, True):
                assert not stuck(timetable, posting, (), has_headers=has_headers)


@pytest.mark.parametrize("posting", [in_flight, one_ahead, when_sent])
def test_a_posted_program_is_the_program_with_a_post_for_each_recv(posting, first_seed):
    for seed in range(first_seed, first_seed + 100):
        timetable = random_timetable(random.Random(seed))
        programs = lower(timetable)
        for program in programs:
            for gate in (None, gate_of(programs, program.rank)):
                gated = program if gate is None else with_gate(program, gate)
                check_posted(program, posting(gated), gate, has_moved=posting is when_sent)


def check_posted(program, posted, gate, *, has_moved):
    """The order of all else stays, a Recv may move; each Recv has a Post, in the order of its link."""
    of_posts = (Post, PassGate, Recv) if has_moved else (Post, PassGate)
    before, after = (
        [each for each in one.instructions if not isinstance(each, of_posts)] for one in (program, posted)
    )
    assert before == after
    for peer in program.in_flight:
        values = [each.value for each in program.instructions if isinstance(each, Recv) and each.peer == peer]
        for kind in (Post, Recv):
            found = [each.value for each in posted.instructions if isinstance(each, kind)]
            assert [value for value in found if value in values] == values
    places = {each: place for place, each in enumerate(posted.instructions)}
    assert all(places[Post(*each)] < places[each] for each in places if isinstance(each, Recv))
    assert posted.instructions.count(PassGate(gate)) == (gate is not None)
    if gate is not None:
        early = Counter(
            each.peer for each in posted.instructions[: places[PassGate(gate)]] if isinstance(each, Post)
        )
        assert all(number <= gate.sent[peer] for peer, number in early.items())
        if has_moved:
            assert early == Counter({peer: number for peer, number in gate.sent.items() if number})
            assert unreceived(posted) == []


def test_the_drawings_of_the_docstring_are_what_the_passes_do():
    drawing = sys.modules["zbpp.schedule.passes.posts"].__doc__
    program = lower(
        Timetable.parse("0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2\n1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2")
    )[1]
    for name, posting in (("when_sent", when_sent), ("too late", at_its_recv), ("one_ahead", one_ahead)):
        posted = posting(program).instructions
        shown = [each for each in posted if not str(each).endswith((" x(1,0) from 0", " x(1,2) from 0"))]
        text = "  ".join(str(each).split(" from")[0].split(" to")[0] for each in shown[:8])
        (line,) = [each for each in drawing.splitlines() if each.startswith(f"    {name} ")]
        assert text.startswith(line.removeprefix(f"    {name}").strip()), (name, text)
