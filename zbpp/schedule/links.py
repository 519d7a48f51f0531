"""Links between ranks: how long a message occupies one, and how long it is on its way.

    F on rank 1   |---F---|                       busy      the message goes out: the link is occupied
    link 1 -> 2           |==busy==|--latency-->|
    F on rank 2                                 |---F---|

A directed pair of ranks has a link of its own. A link sends one message after another, in the order in which
they are made; while one is on its way, the next one may go out. Links that leave a rank over one card share
that order.

`Costs.comm` is a time that occupies nothing. A message over a link takes both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import NamedTuple

from zbpp.schedule.dataflow import produces
from zbpp.schedule.timetable import Action, Op, PlanError, shown

PerStage = float | Sequence[float]
Pairs = Mapping[tuple[int, int], tuple[float, float]]

MS_PER_BYTE = 1e-6  # at one GB/s
_LARGEST = 1e100  # the largest number allowed: products and sums of such numbers are still finite


class Route(NamedTuple):
    """The way of the message that a kind of action makes. ms; busy: of a unit of length 1.

    queue: the receiver, whose link has a card of its own; or the sender, whose links share one.
    """

    receiver: int
    latency: float
    busy: float
    queue: int


@dataclass(frozen=True)
class Links:
    """The links of a pipeline's ranks.

    latency: from when a message has gone out until the receiver has it (ms). busy: how long a message
    occupies its link (ms); it grows with a unit's length, as a slice's, and the latency does not. Both hold
    for all pairs; pairs: {(sender, receiver): (latency, busy)} for some of them.
    x, g: how many times `busy` the activations that leave a stage take, and the gradients; a number, or a
    list with one per stage.
    shared: pairs whose messages leave over one card of their sender, one after another; True: all pairs. A
    link that is not occupied does not count there.
    An empty message, of a unit of length 0, is not sent, and takes nothing.
    Raises PlanError for what is no number, negative or above 1e100, and for a pair that is no two ranks.
    """

    latency: float = 0.0
    busy: float = 0.0
    pairs: Pairs = field(default_factory=dict)
    x: PerStage = 1.0
    g: PerStage = 1.0
    shared: bool | Collection[tuple[int, int]] = False

    @classmethod
    def of_bytes(
        cls,
        x: PerStage,
        g: PerStage | None = None,
        *,
        bandwidth: float | None,
        latency: float = 0.0,
        pairs: Pairs | None = None,
        shared: bool | Collection[tuple[int, int]] = False,
    ) -> Links:
        """Links of these bandwidths, for messages of so many bytes.

        x, g: the bytes of a microbatch's activations, and of its gradients (None: as many); a number, or a
        list with one per stage. bandwidth: GB/s, 1e9 bytes per second; None: links that are not in pairs
        are never occupied. latency: ms. pairs: {(sender, receiver): (latency, bandwidth)} for some of them.
        Raises PlanError, for a bandwidth of 0, too.
        """
        given = _checked_pairs({} if pairs is None else pairs, "bandwidth", "ms and GB/s")
        others = {pair: (own, _ms_per_byte(speed)) for pair, (own, speed) in given.items()}
        busy = 0.0 if bandwidth is None else _ms_per_byte(bandwidth)
        return cls(latency, busy, others, x, x if g is None else g, shared)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", _checked_pairs(self.pairs, "busy", "ms"))
        if not isinstance(self.shared, bool):
            given = self.shared if isinstance(self.shared, Collection) else [self.shared]
            shared = [_checked_pair("shared", each, "write True, or pairs of ranks") for each in given]
            object.__setattr__(self, "shared", frozenset(shared))
        for name in ("latency", "busy", "x", "g"):
            value = getattr(self, name)
            is_list = name in ("x", "g") and isinstance(value, Sequence) and not isinstance(value, str)
            for each in value if is_list else [value]:
                _check(name, value, each)

    def of(self, sender: int, receiver: int) -> tuple[float, float]:
        """(latency, busy) of one pair of ranks."""
        return self.pairs.get((sender, receiver), (self.latency, self.busy))

    def scaled(self, length: float) -> Links:
        """The same links, for units of this length."""
        return replace(self, x=_times(self.x, length), g=_times(self.g, length)) if length else Links()

    @property
    def longest(self) -> float:
        """The most that a message takes where it waits for no other one (ms)."""
        sizes = [each for value in (self.x, self.g) for each in _listed(value)]
        ways = [(self.latency, self.busy), *self.pairs.values()]
        return max(latency + busy * max(sizes) for latency, busy in ways)

    @property
    def has_queues(self) -> bool:
        """Whether a message may wait for another one."""
        return self.busy > 0 or any(busy > 0 for _, busy in self.pairs.values())

    def routes(self, rank_of: Sequence[int]) -> list[Route | None]:
        """By kind, the way of its message; None for a kind that makes none for another rank.

        rank_of: the rank of each stage. Raises PlanError for a pair of ranks that are not there, and for a
        list of another length.
        """
        num_stages, num_ranks = len(rank_of), max(rank_of) + 1
        shared = () if isinstance(self.shared, bool) else self.shared
        for name, pair in [("pairs", each) for each in self.pairs] + [("shared", each) for each in shared]:
            if not max(pair) < num_ranks:
                raise PlanError(f"Links: {name} has {pair}, and there are {num_ranks} ranks, from 0 on")
        sizes = {name: _per_stage(name, getattr(self, name), num_stages) for name in ("x", "g")}
        found: list[Route | None] = []
        for stage in range(num_stages):
            for op in Op:
                values = produces(Action(stage, op, 0), num_stages)
                sent = [each for each in values if rank_of[each.stage] != rank_of[stage]]
                found.append(None)
                for value in sent:
                    pair = rank_of[stage], rank_of[value.stage]
                    latency, busy = self.of(*pair)
                    is_shared = busy > 0 and (self.shared is True or pair in shared)
                    size = sizes[value.name][stage]
                    found[-1] = Route(pair[1], latency, busy * size, pair[0] if is_shared else pair[1])
        return found


class Outbox:
    """What one rank sends: each of its queues is occupied by one message after another.

    busy: of the message of each action of the row (ms). queues: those of the messages' routes.
    """

    def __init__(self, busy: Sequence[float], queues: Sequence[int]) -> None:
        self._busy, self._queues = busy, queues
        self._free: dict[int, float] = {}  # queue -> when it is free

    def send(self, position: int, made: float) -> float:
        """When the message of the action at this position has gone out, if it was made at this time."""
        queue = self._queues[position]
        gone = max(made, self._free.get(queue, 0.0)) + self._busy[position]
        self._free[queue] = gone
        return gone


def _listed(value: PerStage) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value]


def _ms_per_byte(bandwidth: float) -> float:
    _check("bandwidth", bandwidth, bandwidth)
    if bandwidth == 0:
        raise PlanError("Links: bandwidth=0: a link carries some bytes; write GB/s")
    return MS_PER_BYTE / bandwidth


def _checked_pairs(pairs: object, second: str, unit: str) -> dict[tuple[int, int], tuple[float, float]]:
    found: dict[tuple[int, int], tuple[float, float]] = {}
    advice = f"write {{(sender, receiver): (latency, {second})}}, in {unit}"
    if not isinstance(pairs, Mapping):
        raise PlanError(f"Links: pairs={shown(pairs)}: {advice}")
    for pair, own in pairs.items():
        ranks = _checked_pair("pairs", pair, advice)
        numbers = tuple(own) if isinstance(own, Sequence) and not isinstance(own, str) else ()
        if len(numbers) != 2:
            raise PlanError(f"Links: pairs has {pair}: {shown(own)}: {advice}")
        for each in numbers:
            _check("pairs", {pair: own}, each)
        found[ranks] = (float(numbers[0]), float(numbers[1]))
    return found


def _checked_pair(name: str, pair: object, advice: str) -> tuple[int, int]:
    ranks = tuple(pair) if isinstance(pair, Sequence) else ()
    if not (len(ranks) == 2 and all(type(each) is int and each >= 0 for each in ranks)):
        raise PlanError(f"Links: {name} has {shown(pair)}: {advice}")
    if ranks[0] == ranks[1]:
        raise PlanError(f"Links: {name} has {pair}: a rank sends itself nothing")
    return ranks[0], ranks[1]


def _check(name: str, value: object, number: object) -> None:
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not (is_number and 0 <= number <= _LARGEST):  # type: ignore[operator]  # NaN is not
        raise PlanError(f"Links: {name}={shown(value)}: write a number of 0 or more, at most 1e100")


def _per_stage(name: str, value: PerStage, num_stages: int) -> Sequence[float]:
    if not isinstance(value, Sequence):
        return [value] * num_stages
    if len(value) != num_stages:
        raise PlanError(f"Links: {name} has {len(value)} numbers for {num_stages} stages")
    return value


def _times(value: PerStage, factor: float) -> PerStage:
    return [factor * each for each in value] if isinstance(value, Sequence) else value * factor
