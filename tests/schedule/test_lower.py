"""Lowered programs, executed by an interpreter of their own over random timetables and placements."""

import random
import re
import sys
from collections import Counter, defaultdict, deque
from itertools import pairwise

import pytest

from helpers.timetables import makes, needs, random_timetable
from zbpp.planning import plan
from zbpp.schedule import Action, Op, Recv, Reduce, Release, Send, Timetable, lower
from zbpp.schedule.families import FAMILIES


class Interpreter:
    """Ranks take turns at random; a link is a FIFO. Asserts what every rank may rely on.

    bounded: a link holds no more than the receiver's program says, and a full one makes the sender wait.
    """

    def __init__(self, timetable, rng, *, bounded=False):
        self.timetable, self.rng, self.bounded = timetable, rng, bounded
        self.programs = list(lower(timetable))
        self.position = [0] * timetable.num_ranks
        self.mailbox = [set() for _ in self.programs]
        self.links = defaultdict(deque)  # (sender, receiver) -> values under way
        self.unreleased = defaultdict(deque)  # the same link -> values sent, in order
        self.sent, self.received = Counter(), Counter()

    def run(self):
        awake = set(range(self.timetable.num_ranks))
        while awake:
            rank = self.rng.choice(sorted(awake))
            moved = False
            for _ in range(self.rng.choice((1, 3, 100))):
                instructions = self.programs[rank].instructions
                if self.position[rank] == len(instructions) or not self.can(
                    rank, instructions[self.position[rank]]
                ):
                    awake.discard(rank)
                    break
                self.do(rank, instructions[self.position[rank]])
                self.position[rank] += 1
                moved = True
            if moved:  # whoever waited for this rank looks again
                awake |= set(range(self.timetable.num_ranks)) - {rank}
        stuck = [
            f"rank {program.rank}: {program.instructions[at]}"
            for program, at in zip(self.programs, self.position, strict=True)
            if at < len(program.instructions)
        ]
        assert not stuck, stuck

    def can(self, rank, step):
        match step:
            case Recv(_, peer):
                return bool(self.links[peer, rank])
            case Send(_, peer) if self.bounded:
                return len(self.links[rank, peer]) < self.programs[peer].in_flight[rank]
            case Release(value, peer):
                return self.received[rank, peer, str(value)] == 1
        return True

    def do(self, rank, step):
        match step:
            case Recv(value, peer):
                assert self.links[peer, rank].popleft() == str(value)
                self.received[peer, rank, str(value)] += 1
                self.mailbox[rank].add(str(value))
            case Send(value, peer):
                assert peer == self.timetable.rank_of[value.stage] != rank
                self.mailbox[rank].remove(str(value))
                self.sent[rank, peer, str(value)] += 1
                self.links[rank, peer].append(str(value))
                self.unreleased[rank, peer].append(str(value))
            case Release(value, peer):
                assert self.unreleased[rank, peer].popleft() == str(value)
                assert len(self.unreleased[rank, peer]) == self.programs[peer].in_flight[rank] + 1
            case Action():
                assert self.mailbox[rank] >= set(needs(step))
                self.mailbox[rank] -= set(needs(step))
                self.mailbox[rank] |= set(makes(step, self.timetable.num_stages))


def expected_messages(timetable):
    """x upwards and g downwards between neighbouring stages of different ranks, once per microbatch."""
    rank_of = timetable.rank_of
    backward = any(action.op != Op.F for action in timetable.rows[0])
    for lower_stage, (below, above) in enumerate(pairwise(rank_of)):
        for unit in units_of(timetable) if below != above else ():
            yield below, above, f"x({lower_stage + 1},{unit})"
            if backward:
                yield above, below, f"g({lower_stage},{unit})"


def units_of(timetable):
    """The texts of all units."""
    microbatches, slices = range(timetable.num_microbatches), range(timetable.num_slices)
    return [f"{m}.{k}" if len(slices) > 1 else f"{m}" for m in microbatches for k in slices]


def check(timetable, rng, **options):
    interpreter = Interpreter(timetable, rng, **options)
    interpreter.run()
    assert interpreter.sent == interpreter.received == Counter(expected_messages(timetable))
    for program, row in zip(interpreter.programs, timetable.rows, strict=True):
        assert [step for step in program.instructions if isinstance(step, Action)] == list(row)
        check_reduces(program.instructions)
    return interpreter


def check_reduces(instructions):
    """A stage's Reduce stands behind its last W or BW and that action's Send, and nowhere else."""
    left = Counter(step.stage for step in instructions if is_complete(step))
    due = before = None
    for step in instructions:
        if due is not None and not isinstance(step, Send):
            assert step == Reduce(due)
            due = None
        else:
            assert not isinstance(step, Reduce)
            assert not (isinstance(step, Send) and isinstance(before, Reduce))
        before = step
        if is_complete(step):
            left[step.stage] -= 1
            due = step.stage if left[step.stage] == 0 else None
    assert due is None


def is_complete(step):
    """Whether a step is an action that completes the gradients of a microbatch."""
    return isinstance(step, Action) and step.op in (Op.W, Op.BW)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2, 3))])
def test_lower_any_timetable(part, first_seed):
    """2,000 random timetables and placements: no deadlock, every message paired, nothing left over."""
    for seed in range(first_seed + part, first_seed + 2000, 4):
        rng = random.Random(seed)
        try:
            timetable = random_timetable(rng, num_slices=(1, 1, 2, 1, 3)[seed % 5])
            interpreter = check(timetable, rng, bounded=seed % 8 < 4)
            assert not any(interpreter.mailbox)
            assert not any(interpreter.links.values())
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"random timetable of seed {seed}: {error}") from error


def test_lower_forward_only_sends_no_gradients(first_seed):
    """Evaluation: no g travels; activations and losses alone remain."""
    for seed in range(first_seed, first_seed + 200):
        rng = random.Random(seed)
        timetable = random_timetable(rng, num_slices=1 + seed % 2).forward_only()
        left = set().union(*check(timetable, rng, bounded=seed % 2 == 0).mailbox)
        stages, units = range(timetable.num_stages), units_of(timetable)
        losses = {f"g({timetable.num_stages - 1},{unit})" for unit in units}
        assert left == losses | {f"saved({stage},{unit})" for stage in stages for unit in units}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_programs_of_every_family_run(name, num_ranks):
    check(plan(name, num_ranks, 8), random.Random(0), bounded=True)


def test_replicas_that_lack_different_microbatches_reduce_stages_in_one_order(first_seed):
    """A reduction is collective over the replicas. Some orders would differ, or the test could not fail."""
    differing = 0
    for seed in range(first_seed, first_seed + 60):
        rng = random.Random(seed)
        timetable = random_timetable(rng)
        number = timetable.num_microbatches
        lacking = timetable.first(number - rng.randrange(number))
        orders = [
            [
                [each.stage for each in program.instructions if isinstance(each, Reduce)]
                for program in programs
            ]
            for programs in (lower(timetable), lower(lacking).reducing_as(timetable), lower(lacking))
        ]
        assert orders[0] == orders[1]
        differing += orders[1] != orders[2]
    assert differing > 5


def test_lower_sends_nothing_between_stages_of_one_rank():
    """In a V, stages 1 and 2 share rank 1: x and g stay there."""
    timetable = Timetable.parse("0F0 3F0 3BW0 0BW0\n1F0 2F0 2BW0 1BW0")
    sends = [str(step.value) for step in lower(timetable)[1].instructions if isinstance(step, Send)]
    assert sends == ["x(3,0)", "g(0,0)"]


def test_a_value_is_received_after_what_its_link_carries_before_it():
    """Rank 1 needs g(1,0) before x(1,1), but rank 0 sends x(1,1) first."""
    timetable = Timetable.parse("0F0 2F0 0F1 2BW0 2F1 2BW1 0BW0 0BW1\n1F0 3F0 3BW0 1BW0 1F1 3F1 3BW1 1BW1")
    check(timetable, random.Random(0))
    steps = [step for step in lower(timetable)[1].instructions if isinstance(step, Action | Recv)]
    assert "Recv x(1,1) from 0, Recv g(1,0) from 0, 1BW0, 1F1" in ", ".join(map(str, steps))


def test_the_drawing_of_a_link_in_the_docstring_is_what_lower_does():
    drawing = sys.modules["zbpp.schedule.lower"].__doc__
    timetable = Timetable.parse(
        "0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1\n1F0 2F0 2B0 1F1 2W0 1B0 1W0 2F1 2B1 2W1 1B1 1W1"
    )
    check(timetable, random.Random(0))
    for rank, row in enumerate(timetable.rows):
        assert f"rank {rank} runs   {row[:4]!s} ..." in drawing
    sent = [str(step.value) for step in lower(timetable)[0].instructions if isinstance(step, Send)][:3]
    assert f"carries  {'  '.join(sent)}\n" in drawing
    received = [step for step in lower(timetable)[1].instructions if isinstance(step, Action | Recv)][:7]
    assert f"right   {'  '.join(str(step).removesuffix(' from 0') for step in received)}\n" in drawing


def test_the_programs_of_two_ranks_read_as_written_here():
    """Messages stand where they must."""
    programs = lower(plan("zb_h1", 2, 2))
    assert str(programs[0]).splitlines() == [
        "0F0", "Send x(1,0) to 1", "0F1", "Send x(1,1) to 1",
        "Recv g(0,0) from 1", "0B0", "0W0", "Recv g(0,1) from 1", "0B1", "0W1", "Reduce 0",
    ]  # fmt: skip
    assert str(programs[1]).splitlines() == [
        "Recv x(1,0) from 0", "1F0", "1B0", "Send g(0,0) to 0",
        "Recv x(1,1) from 0", "1F1", "1B1", "Send g(0,1) to 0", "1W0", "1W1", "Reduce 1",
    ]  # fmt: skip
    assert programs[0].in_flight == {1: 1}
    assert programs[1].in_flight == {0: 1}


def test_a_rank_lowers_its_own_program_only(monkeypatch):
    """64 ranks, 1024 microbatches: nothing is lowered until asked for, and then four links, not 126."""
    looked_at = []
    module = sys.modules["zbpp.schedule.lower"]  # as an attribute of the package, lower is the function

    class Link(module.Link):
        def __init__(self, timeline, values, sender, receiver):
            looked_at.append((sender, receiver))
            super().__init__(timeline, values, sender, receiver)

    monkeypatch.setattr(module, "Link", Link)
    programs = lower(plan("zb_h1", 64, 1024))
    assert looked_at == []
    instructions = programs[5].instructions
    assert sorted(looked_at) == [(4, 5), (5, 4), (5, 6), (6, 5)]
    assert sum(isinstance(step, Recv) for step in instructions) == 2 * 1024


def test_the_first_page_of_lower_shows_a_program_of_1f1b():
    """Its picture of Release: rank 0 of two ranks, without the messages that come back."""
    shown = re.search(r"rank 0 runs   (0F0  Send x0.*)", sys.modules["zbpp.schedule.lower"].__doc__).group(1)
    program = [str(each) for each in lower(plan("1f1b", 2, 4))[0].instructions]
    sent = [re.sub(r"x\(1,(\d)\) to 1", r"x\1", each) for each in program if "Recv" not in each]
    assert "  ".join(sent).startswith(shown)
