"""Random timetables that can run, and the data-flow table written out once more by hand.

Nothing here asks zbpp.schedule.dataflow: this is the reference that it is held against.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from zbpp.features.activation_offload.choice import choose_rank_offload
from zbpp.features.activation_offload.copies import (
    Await,
    Drop,
    Fetch,
    Offload,
    Placed,
    RankOffload,
    with_copies,
)
from zbpp.schedule import Action, Costs, Op, Timeline, Timetable, Unit, Value, lower
from zbpp.schedule.interpret.timing import program_timeline

F, B, W, BW = Op.F, Op.B, Op.W, Op.BW


def needs(action: Action) -> list[str]:
    """The values that an action consumes, as text."""
    stage, op, microbatch = action
    here = f"({stage},{microbatch})"
    if op == F:
        return [f"x{here}"] if stage > 0 else []
    return [f"deferred{here}"] if op == W else [f"g{here}", f"saved{here}"]


def makes(action: Action, num_stages: int) -> list[str]:
    """The values that an action produces, without `done`, which nobody consumes."""
    stage, op, microbatch = action
    here, above, below = (f"({s},{microbatch})" for s in (stage, stage + 1, stage - 1))
    if op == F:
        return [f"g{here}" if stage == num_stages - 1 else f"x{above}", f"saved{here}"]
    made = [f"g{below}"] if op in (B, BW) and stage > 0 else []
    return made + ([f"deferred{here}"] if op == B else [])


def random_timetable(
    rng: random.Random, *, most_ranks: int = 5, most_microbatches: int = 5, num_slices: int = 1
) -> Timetable:
    """Any placement of 1 to 8 stages, any order that can run, a stage's units in the order of the law."""
    num_ranks = rng.randint(1, most_ranks)
    rank_of = random_placement(rng, num_ranks, rng.randint(num_ranks, 8))
    return random_order(rng, rank_of, rng.randint(1, most_microbatches), num_slices)


def random_order(
    rng: random.Random, rank_of: Sequence[int], num_microbatches: int, num_slices: int = 1
) -> Timetable:
    """Any order that can run, on this placement."""
    rows: list[list[Action]] = [[] for _ in {*rank_of}]
    for action in _random_execution(rng, len(rank_of), num_microbatches, num_slices):
        rows[rank_of[action.stage]].append(action)
    return Timetable(rows)


def random_placement(rng: random.Random, num_ranks: int, num_stages: int) -> list[int]:
    """An owner for each stage; every rank owns one or more."""
    rank_of = list(range(num_ranks)) + [rng.randrange(num_ranks) for _ in range(num_stages - num_ranks)]
    rng.shuffle(rank_of)
    return rank_of


def _random_execution(
    rng: random.Random, num_stages: int, num_microbatches: int, num_slices: int
) -> Iterator[Action]:
    """All actions, one at a time, each drawn among those that could run next.

    next_up: of the actions of a stage and op, the number of the next one.
    """
    forwards = [(m, k) for m in range(num_microbatches) for k in range(num_slices)]
    backwards = [(m, k) for m in range(num_microbatches) for k in reversed(range(num_slices))]
    units = {F: _units(forwards, num_slices), B: _units(backwards, num_slices)}
    next_up = {(stage, op): 0 for stage in range(num_stages) for op in (F, B, W)}
    whole = {
        (s, number)
        for s in range(num_stages)
        for number in range(len(forwards))
        if rng.random() < rng.choice((0, 0.5))
    }
    weight = {op: rng.choice((0.05, 1, 1, 20)) for op in Op}  # lopsided: deep warm-ups, late W's, ...
    there: set[str] = set()
    while True:
        ready = [each for each in _candidates(next_up, whole, units) if there.issuperset(needs(each))]
        if not ready:
            return
        action = rng.choices(ready, [weight[each.op] for each in ready])[0]
        there |= set(makes(action, num_stages))
        for op in {F: (F,), B: (B,), W: (W,), BW: (B, W)}[action.op]:
            next_up[action.stage, op] += 1
        yield action


def _units(pairs: list[tuple[int, int]], num_slices: int) -> list[int]:
    """The units of (microbatch, slice) pairs."""
    return [m if num_slices == 1 else Unit(m * num_slices + k, num_slices) for m, k in pairs]


def _candidates(
    next_up: dict[tuple[int, Op], int], whole: set[tuple[int, int]], units: dict[Op, list[int]]
) -> Iterator[Action]:
    for (stage, op), number in next_up.items():
        if number == len(units[F]):
            continue
        unit = units[F if op == F else B][number]
        if (stage, number) not in whole or op == F:
            yield Action(stage, op, unit)
        elif op == B and next_up[stage, W] == number:  # a BW is a W too, and W's have the order of B's
            yield Action(stage, BW, unit)


def by_hand(
    timetable: Timetable,
    time: Callable[[int, Op, int], float],
    message: Callable[[int, int], float],
) -> dict[tuple[int, int], float]:
    """(rank, position) -> end of each action, by repeated passes over the rows."""
    made: dict[str, tuple[float, int, int]] = {}
    ends: dict[tuple[int, int], float] = {}
    clock = [0.0] * timetable.num_ranks
    left = [list(row) for row in timetable.rows]
    reached = [0] * timetable.num_ranks
    while any(reached[rank] < len(row) for rank, row in enumerate(left)):
        for rank, row in enumerate(left):
            while reached[rank] < len(row):
                action = row[reached[rank]]
                if any(value not in made for value in needs(action)):
                    break
                arrivals = [
                    end + (message(sender, action.microbatch) if owner != rank else 0.0)
                    for end, owner, sender in (made[value] for value in needs(action))
                ]
                clock[rank] = max([clock[rank], *arrivals]) + time(*action)
                for value in makes(action, timetable.num_stages):
                    made[value] = clock[rank], rank, action.stage
                ends[rank, reached[rank]] = clock[rank]
                reached[rank] += 1
    return ends


def away(value: Value, *, made: int, dropped: int, fetched: int, used: int) -> tuple[Placed, ...]:
    """One round trip by hand: positions in the row of F, of the actions after Drop and Fetch, and of B."""
    return (
        Placed(made + 1, True, Offload(value)),
        Placed(dropped, False, Drop(value)),
        Placed(fetched, True, Fetch(value)),
        Placed(used, False, Await(value)),
    )


def choose_offload(timeline: Timeline, costs: Costs, *limit: float, late: bool = False) -> list[RankOffload]:
    """What leaves each rank."""
    ranks = range(timeline.timetable.num_ranks)
    return [choose_rank_offload(timeline, rank, costs, *limit, late=late) for rank in ranks]


def with_offload(timetable: Timetable, costs: Costs, offload: Sequence[RankOffload]) -> Timeline:
    """The simulated step with these round trips."""
    return program_timeline([*map(with_copies, lower(timetable), offload)], costs)
