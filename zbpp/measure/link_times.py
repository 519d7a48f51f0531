"""Measure the links between ranks: latency and time per byte of each direction, in a few seconds.

    lower rank    |--x-->          |<--x--|     alone: there and back, one message at a time
    higher rank          |--x-->

    both          |--x-->                       at once: both directions
                  |<--x--|

The links are made as those of a Pipeline. Pairs that have no rank in common are measured at the same time,
as they are used in training. Clocks of different hosts don't agree, so there each direction gets half of a
round trip's latency.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.devices import synchronize
from zbpp.job.agreement import broadcast, gather
from zbpp.runtime.host_links import OWN_LIMIT, LinkGroup, Started
from zbpp.runtime.layout import Message
from zbpp.runtime.processes.groups import close_groups, in_rounds, link_groups
from zbpp.schedule import Costs, Links, Timetable
from zbpp.schedule.links import MS_PER_BYTE

NEGLIGIBLE = 0.01
"""A link is left out if a message's latency and busy time are less than this share of the shortest action."""

Pair = tuple[int, int]  # (sender, receiver)
Table = Mapping[Pair, tuple[float, float]]  # (latency in ms, ms per byte)

_LEAST = 2**16  # bytes; the times of less tell no bandwidth
_GO = 8  # bytes of the message that lets both ends begin
_ROUNDS, _BUDGET = (3, 9), 1000.0  # how often each size is sent; ms for a pair of ranks, while three fit in
_FASTEST = 1e6  # GB/s, of a link on which more bytes take no longer
_ALONE, _AT_ONCE, _OTHER = "alone", "at once", "other"


class _Kind(NamedTuple):
    """A kind of message; only those that go alone or at once are counted."""

    pair: Pair
    mode: str
    nbytes: int


_Stamps = Mapping[_Kind, Sequence[float]]  # ms


class _Host(NamedTuple):
    """What a rank knows: when its messages went out, and when others arrived."""

    name: str
    sent: _Stamps
    arrived: _Stamps


def with_links(costs: Costs, table: Table, x: int, g: int) -> Costs:
    """The costs with the links that count. Without any they are returned as they are.

    x, g: bytes of a microbatch's activations between stages, and of their gradients. A pair of ranks counts
    if a message of one of its directions takes at least NEGLIGIBLE of the shortest action. `comm` is 0 then,
    since the links say what it said.
    """
    shortest = min((each for each in _times_of(costs) if each > 0), default=0.0)

    def counts(pair: Pair) -> bool:
        latency, per_byte = table[pair]
        return latency + per_byte * max(x, g) >= NEGLIGIBLE * shortest

    kept = [pair for pair in table if counts(pair) or counts(pair[::-1])]
    if not kept or not x:
        return costs
    pairs = {pair: (table[pair][0], MS_PER_BYTE / table[pair][1]) for pair in kept}
    links = Links.of_bytes(float(x), float(g), bandwidth=None, pairs=pairs)
    return replace(costs, comm=[0.0] * len(_as_list(costs.f)), links=links)


def _times_of(costs: Costs) -> list[float]:
    return [each for value in (costs.f, costs.b, costs.w) for each in _as_list(value)]


def _as_list(value: float | Sequence[float]) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value]


def message_bytes(
    inputs: Mapping[int, tuple[Any, ...]],
    group: dist.ProcessGroup | None = None,
    sent: Callable[[int, Message], Message] = lambda boundary, message: message,
) -> tuple[int, int]:
    """(x, g): the bytes of the largest activations and gradients between stages. Collective.

    inputs: of the forwards of this rank's stages. sent(boundary, message): what goes in place of the message
    over boundary k, that between stages k and k + 1.
    """
    received = {
        stage: tuple([each for each in given if isinstance(each, Tensor)])
        for stage, given in inputs.items()
        if stage
    }

    def nbytes(stage: int, message: Message) -> int:
        return sum(each.nbytes for each in sent(stage - 1, message) if each is not None)

    x = max((nbytes(*each) for each in received.items()), default=0)
    gradients = {stage: [each for each in given if each.requires_grad] for stage, given in received.items()}
    g = max((nbytes(stage, tuple(given)) for stage, given in gradients.items()), default=0)
    everyone = gather((x, g), group)
    return max(each for each, _ in everyone), max(each for _, each in everyone)


def timed_links(
    timetable: Timetable,
    nbytes: Sequence[int],
    device: torch.device,
    timeout: float,
    group: dist.ProcessGroup | None = None,
) -> Table:
    """The latency and the time per byte of each link between a timetable's stages, as rank 0 finds them.

    nbytes: of the messages. group: of the timetable's ranks; None: all processes of the job. Collective over
    the group.
    """
    ranks = [(one, other) for one, other in pairwise(timetable.rank_of) if one != other]
    pairs = sorted({pair for each in ranks for pair in (each, each[::-1])})
    if not pairs or not max(nbytes):
        return {}
    groups, mine = link_groups(group, pairs, timeout, device), dist.get_rank(group)
    sent: dict[_Kind, list[float]] = defaultdict(list)
    arrived: dict[_Kind, list[float]] = defaultdict(list)
    for first, second in in_rounds(pairs):
        if first < second and mine in (first, second):
            there = (first, second) if mine == first else (second, first)
            end = _End(there, groups[there], groups[there[::-1]], device, sent, arrived)
            _measure(end, _sizes(nbytes))
    everyone = gather(_Host(socket.gethostname(), {**sent}, {**arrived}), group)  # all have ended
    close_groups(groups.values())
    return broadcast(_table(pairs, everyone), group)


def _sizes(nbytes: Sequence[int]) -> list[int]:
    """The messages' own sizes, and two others."""
    most = max(*nbytes, _LEAST)
    return sorted({*nbytes, most // 2, most // 8} - {0})


class _End:
    """One rank's end of a pair of links. there: the link on which it sends."""

    def __init__(
        self,
        there: Pair,
        out: LinkGroup,
        back: LinkGroup,
        device: torch.device,
        sent: dict[_Kind, list[float]],
        arrived: dict[_Kind, list[float]],
    ) -> None:
        self.there, self.is_first = there, there[0] < there[1]
        self._out, self._back, self._device = out, back, device
        self._sent, self._arrived = sent, arrived
        self._under_way: list[Started] = []
        self._num_sent = self._num_received = 0

    def post(self, nbytes: int) -> Started:
        """Start to receive."""
        self._num_received += 1
        return self._back.recv([self._bytes(nbytes)], self._peer, self._num_received)

    def send(self, nbytes: int, mode: str) -> None:
        """Start to send."""
        self._num_sent += 1
        message = self._bytes(nbytes)
        synchronize(self._device)
        self._sent[_Kind(self.there, mode, nbytes)].append(_now())
        self._under_way.append(self._out.send([message], self._peer, self._num_sent))

    def receive(self, posted: Started, nbytes: int, mode: str) -> None:
        """Wait for a message whose receive was started."""
        posted.wait(OWN_LIMIT)
        synchronize(self._device)
        self._arrived[_Kind(self.there[::-1], mode, nbytes)].append(_now())

    def agree(self, number: int) -> int:
        """The first rank's number, on both."""
        self._num_sent, self._num_received = self._num_sent + 1, self._num_received + 1
        told = torch.tensor([number], device=self._device)
        if self.is_first:
            self._out.send([told], self._peer, self._num_sent).wait(OWN_LIMIT)
        else:
            self._back.recv([told], self._peer, self._num_received).wait(OWN_LIMIT)
        return int(told)

    def finish(self) -> None:
        """Wait until all that was sent has gone out."""
        for each in self._under_way:
            each.wait(OWN_LIMIT)
        self._under_way.clear()

    @property
    def _peer(self) -> int:
        return 1 if self.is_first else 0  # in a group of the two

    def _bytes(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)


def _measure(end: _End, sizes: Sequence[int]) -> None:
    """Send messages of these sizes, alone and at once. Both ends call it."""
    least, most = _ROUNDS
    took = _alone(end, [sizes[-1]] * 2, _OTHER)
    rounds = end.agree(max(least, min(most, int(_BUDGET / (2 * len(sizes) * took)))))
    round_trip = _alone(end, [_GO] * least, _OTHER)
    _alone(end, [*sizes] * rounds, _ALONE)
    _at_once(end, [*sizes] * rounds, round_trip)
    end.finish()


def _alone(end: _End, sizes: Sequence[int], mode: str) -> float:
    """One message at a time, there and back. Returns the median time of that (ms)."""
    took, posted = [], end.post(sizes[0])
    for nbytes, following in zip(sizes, [*sizes[1:], None], strict=True):
        begin = _now()
        if end.is_first:
            end.send(nbytes, mode)
        end.receive(posted, nbytes, mode)
        if following is not None:
            posted = end.post(following)  # before the message that makes the other rank send
        if not end.is_first:
            end.send(nbytes, mode)
        took.append(_now() - begin)
    return median(took)


def _at_once(end: _End, sizes: Sequence[int], round_trip: float) -> None:
    """Both ranks send: the first one tells the other to begin, and begins when that has heard it."""
    for nbytes in sizes:
        if end.is_first:
            posted = end.post(nbytes)
            end.send(_GO, _OTHER)
            time.sleep(round_trip / 2e3)
        else:
            go, posted = end.post(_GO), end.post(nbytes)
            end.receive(go, _GO, _OTHER)
        end.send(nbytes, _AT_ONCE)
        end.receive(posted, nbytes, _AT_ONCE)


def _now() -> float:
    return time.perf_counter() * 1e3


# ---------------------------------------------------------------- from times to a table


def _table(pairs: Sequence[Pair], hosts: Sequence[_Host]) -> Table:
    return {pair: _of_pair(pair, hosts) for pair in pairs}


def _of_pair(pair: Pair, hosts: Sequence[_Host]) -> tuple[float, float]:
    """(latency, ms per byte): of messages that go alone, or at once with others, whichever take longer."""
    one, other = (hosts[rank].name for rank in pair)
    later = 0.0 if one == other else _clock_difference(pair, hosts)
    fits = []
    for mode in (_ALONE, _AT_ONCE):
        times = {size: took - later for size, took in _times(pair, mode, hosts).items()}
        fits.append((times[max(times)], fitted(times)))
    return max(fits)[1]


def _times(pair: Pair, mode: str, hosts: Sequence[_Host]) -> dict[int, float]:
    """By size, the shortest time from when a message was sent until it was received (ms).

    Longer ones are those of a busy CPU, too.
    """
    sent, arrived = hosts[pair[0]].sent, hosts[pair[1]].arrived
    return {
        kind.nbytes: min(end - begin for begin, end in zip(stamps, arrived[kind], strict=True))
        for kind, stamps in sent.items()
        if kind.pair == pair and kind.mode == mode
    }


def _clock_difference(pair: Pair, hosts: Sequence[_Host]) -> float:
    """How far the receiver's clock is before the sender's (ms), if both directions have the same latency."""
    there, back = (_times(each, _ALONE, hosts) for each in (pair, pair[::-1]))
    return (there[min(there)] - back[min(back)]) / 2


def fitted(times: Mapping[int, float]) -> tuple[float, float]:
    """(latency, ms per byte) of times by bytes: least squares, neither of them negative."""
    nbytes, took = np.array([*times], dtype=float), np.array([*times.values()])
    fastest = MS_PER_BYTE / _FASTEST
    per_byte, latency = np.polyfit(nbytes, took, 1) if len(times) > 1 else (0.0, took[0])
    if latency < 0:
        per_byte, latency = float(nbytes @ took / (nbytes @ nbytes)), 0.0
    elif per_byte < fastest:
        per_byte, latency = fastest, max(0.0, float(took.mean()))
    return float(latency), max(float(per_byte), fastest)
