"""Gates: what may run before it is known that the weights are right, over random timetables."""

import random
from collections import Counter, defaultdict, deque

import pytest

from helpers.timetables import makes, needs, random_timetable
from zbpp.features.post_validation.gate import gate_of, gate_positions
from zbpp.planning import plan
from zbpp.schedule import Action, Op, Recv, Release, Send, Timetable, lower

TIMETABLES = [random_timetable(random.Random(seed)) for seed in range(150)]
TIMETABLES += [plan(name, 4, 8) for name in ("1f1b", "zb_h2", "zb_v", "dualpipe_v", "interleaved_1f1b")]


def before_gates(timetable):
    rows = zip(timetable.rows, gate_positions(timetable), strict=True)
    return {action for row, gate in rows for action in list(row)[:gate]}


def test_gates_stand_before_the_first_backward_and_as_late_as_they_can():
    assert gate_positions(plan("zb_h1", 4, 8)) == (4, 3, 2, 1)
    # Stage 1 runs a second F without a backward before it, but that F's input is made behind rank 0's gate.
    assert gate_positions(Timetable.parse("0F0 0BW0 0F1 0BW1\n1F0 1F1 1BW0 1BW1")) == (1, 1)


@pytest.mark.parametrize("number", range(len(TIMETABLES)))
def test_what_runs_before_a_gate_needs_nothing_that_is_made_behind_one(number):
    timetable = TIMETABLES[number]
    early = before_gates(timetable)
    made = {value for action in early for value in makes(action, timetable.num_stages)}
    assert all(action.op == Op.F for action in early)
    assert all(set(needs(action)) <= made for action in early)
    for row, gate in zip(timetable.rows, gate_positions(timetable), strict=True):  # no gate could be later
        assert gate == len(row) or row[gate].op != Op.F or not set(needs(row[gate])) <= made


class Links:
    """Ranks that run their programs as far as their gates, then drop what the links carry."""

    def __init__(self, timetable):
        programs = lower(timetable)
        self.work = []
        for rank, program in enumerate(programs):
            gate = gate_of(programs, rank)
            place, actions = 0, 0
            while actions < gate.position:
                actions += isinstance(program.instructions[place], Action)
                place += 1
            # The sends and releases behind the last action before the gate, but no receive for the next one.
            while isinstance(program.instructions[place], Send | Release):
                place += 1
            self.work.append(deque([*program.instructions[:place], *gate.dropped]))
        self.links = defaultdict(deque)
        self.received = Counter()

    def step(self, rank):
        """Whether the rank could go on."""
        match self.work[rank][0]:
            case Send(value, peer):
                self.links[rank, peer].append(value)
            case Release(value, peer):
                if (rank, peer, value) not in self.received:
                    return False
            case Recv(_, sender) | int(sender):
                if not self.links[sender, rank]:
                    return False
                self.received[sender, rank, self.links[sender, rank].popleft()] += 1
        self.work[rank].popleft()
        return True


@pytest.mark.parametrize("number", range(len(TIMETABLES)))
def test_a_step_that_begins_again_leaves_no_message_and_nobody_waiting(number):
    timetable, rng = TIMETABLES[number], random.Random(number)
    links = Links(timetable)
    awake = set(range(timetable.num_ranks))
    while awake:
        rank = rng.choice(sorted(awake))
        if links.work[rank] and links.step(rank):
            awake = set(range(timetable.num_ranks))
        else:
            awake.discard(rank)
    assert not any(links.work)
    assert not any(links.links.values())


@pytest.mark.parametrize("number", range(len(TIMETABLES)))
def test_a_rank_knows_how_many_messages_come_before_the_senders_gate(number):
    timetable = TIMETABLES[number]
    early, programs = before_gates(timetable), lower(timetable)
    for rank in range(timetable.num_ranks):
        coming = Counter(
            timetable.rank_of[action.stage]
            for action in early
            if action.stage + 1 < timetable.num_stages and timetable.rank_of[action.stage + 1] == rank
        )
        del coming[rank]
        assert {sender: number for sender, number in gate_of(programs, rank).sent.items() if number} == coming
