"""Latency and bandwidth of links: between neighbours in the order of ranks, and between any two nodes.

Links of one round have no rank in common and are measured at the same time, as a pipeline uses them: so a
network card or a switch that they share slows them here, too. Each direction has a process group of its own,
as in a pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from zbpp.benchmark.cluster.machines import hosts_of_ranks
from zbpp.benchmark.cluster.rows import OK, SLOW
from zbpp.benchmark.cluster.settings import Settings
from zbpp.job.agreement import gather
from zbpp.job.world import World
from zbpp.runtime.parallel.groups import close_groups, link_groups

if TYPE_CHECKING:
    from zbpp.benchmark.cluster.parts import Found, Step

_TURNS = 12  # of which the first two connect and warm up
_SLOW = 0.5  # of the median bandwidth of links of the same kind
_MOST_ROWS = 16  # of one kind; with more links only the slowest have a row
Pair = tuple[int, int]


class Link(NamedTuple):
    """A measured link between two ranks. one_way, both_ways: GB/s, the latter summed over both directions."""

    ranks: Pair
    kind: str
    latency_ms: float
    one_way: float
    both_ways: float


def steps(settings: Settings, here: World) -> Iterator[Step]:
    """Rows for the links inside nodes, between nodes, and of all pairs of nodes. Collective."""
    if here.size < 2:
        yield "links", lambda: (OK, "one rank has no links", {})
        return
    hosts = hosts_of_ranks()
    found: list[Link] = []

    def measure(pairs: list[list[Pair]], kind: Callable[[Pair], str]) -> Found:
        for each in pairs:
            found.extend(_round(each, kind, settings, here))
        return OK, f"{sum(map(len, pairs))} links measured, those of a round at the same time", {}

    yield "neighbours", lambda: measure(neighbours(here.size), lambda pair: _kind(pair, hosts))
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) > 1:
        pairs = [[(firsts[a], firsts[b]) for a, b in each] for each in all_pairs(len(firsts))]
        yield "all pairs of nodes", lambda: measure(pairs, lambda pair: "pair of nodes")
    for kind in dict.fromkeys(each.kind for each in found):
        links = [each for each in found if each.kind == kind]
        yield f"links {kind}", lambda links=links: _summary(links)  # type: ignore[misc]
        for link in shown(links):
            name = f"{link.ranks[0]} <-> {link.ranks[1]} {kind}"
            yield name, lambda link=link, links=links: judged(link, links)  # type: ignore[misc]


def neighbours(size: int) -> list[list[Pair]]:
    """Ranks r and r + 1, and the last with the first: rounds without a common rank."""
    pairs = [(rank, rank + 1) for rank in range(size - 1)]
    rounds = [pairs[::2], pairs[1::2]]
    return [each for each in (*rounds, [(0, size - 1)] if size > 2 else []) if each]


def all_pairs(number: int) -> list[list[Pair]]:
    """Every pair of `number` players once, in rounds where each plays once: the circle method."""
    players: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        meetings = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def shown(links: Sequence[Link]) -> list[Link]:
    """The links that get a row: all, or the slowest of many."""
    if len(links) <= _MOST_ROWS:
        return list(links)
    return sorted(links, key=lambda link: link.one_way)[: _MOST_ROWS // 4]


def judged(link: Link, links: Sequence[Link]) -> Found:
    """SLOW if the link has less than half of the bandwidth that links of its kind have."""
    usual = median(each.one_way for each in links)
    words = (
        f"latency {link.latency_ms * 1e3:.0f} us, {link.one_way:.2f} GB/s one way, "
        f"{link.both_ways:.2f} GB/s both ways at once"
    )
    if link.one_way >= _SLOW * usual:
        return OK, words, link._asdict()
    advice = (
        f"; links {link.kind} have {usual:.2f} GB/s: look at the cable, the card and NCCL_DEBUG=INFO of "
        "these nodes, or leave the node out"
    )
    return SLOW, words + advice, link._asdict()


def _summary(links: Sequence[Link]) -> Found:
    speeds = [each.one_way for each in links]
    latencies = [each.latency_ms for each in links]
    text = (
        f"{len(links)}: {min(speeds):.2f} to {max(speeds):.2f} GB/s one way (median {median(speeds):.2f}), "
        f"latency median {median(latencies) * 1e3:.0f} us"
    )
    return OK, text, {"links": [each._asdict() for each in links]}


def _kind(pair: Pair, hosts: Sequence[str]) -> str:
    return "inside a node" if hosts[pair[0]] == hosts[pair[1]] else "between nodes"


def _round(pairs: list[Pair], kind: Callable[[Pair], str], settings: Settings, here: World) -> list[Link]:
    """Measure links without a common rank at the same time. Collective."""
    directions = [link for pair in pairs for link in (pair, pair[::-1])]
    groups = link_groups(None, directions, settings.timeout, here.device)
    mine = next((pair for pair in pairs if here.rank in pair), None)
    measured: Link | None = None
    dist.barrier()
    if mine is not None:
        measured = _measure(mine, kind(mine), groups, settings, here)
    everyone = gather(measured)
    close_groups(groups.values())
    return sorted({each.ranks: each for each in everyone if each is not None}.values())


def _measure(pair: Pair, kind: str, groups: dict[Pair, Any], settings: Settings, here: World) -> Link:
    other = pair[1] if here.rank == pair[0] else pair[0]
    large = settings.message_mib * 2**20
    talk = _Talk(here, other, groups)
    latency = talk.there_and_back(4) / 2
    one_way = talk.there_and_back(large) / 2
    both = talk.at_once(large)
    return Link(pair, kind, latency, large / 1e6 / one_way, 2 * large / 1e6 / both)


class _Talk:
    """One rank's end of both directions between two ranks."""

    def __init__(self, here: World, other: int, groups: dict[Pair, Any]) -> None:
        self._device, self._other = here.device, other
        self._out, self._in = groups[here.rank, other], groups[other, here.rank]
        self._is_first = here.rank < other

    def there_and_back(self, num_bytes: int) -> float:
        """Median ms of a message and its answer."""
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

        def turn() -> None:
            for sends in (self._is_first, not self._is_first):
                if sends:
                    dist.send(message, dst=self._other, group=self._out)
                else:
                    dist.recv(message, src=self._other, group=self._in)

        return self._timed(turn)

    def at_once(self, num_bytes: int) -> float:
        """Median ms of two messages that pass each other."""
        sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2))

        def turn() -> None:
            works = [
                dist.irecv(received, src=self._other, group=self._in),
                dist.isend(sent, dst=self._other, group=self._out),
            ]
            for work in works:
                assert work is not None  # this rank is in both groups
                work.wait()

        return self._timed(turn)

    def _timed(self, turn: Callable[[], None]) -> float:
        times = []
        for _ in range(_TURNS):
            begin = time.perf_counter()
            turn()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append((time.perf_counter() - begin) * 1e3)
        return median(times[2:])
