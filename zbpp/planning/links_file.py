"""A file of links: what messages take between ranks, as JSON.

    {"latency": 0.05, "bandwidth": 12.5, "x": 33.5e6,
     "pairs": {"1->2": {"latency": 30, "bandwidth": 0.125}, "2<->3": {"latency": 5}}}

latency: ms, of every link. bandwidth: GB/s. x: the bytes of a microbatch's activations; g: of its gradients,
if they differ. pairs: some links, in one direction or in both. In place of bandwidth and bytes, `busy` says
how long a message occupies a link, in ms. shared: true, or a list such as ["1<->2"], if links leave a rank
over one card.

With x, and neither latency nor bandwidth for every link, pairs says both directions of the links that count,
and other links cost nothing. `zbpp measure` writes this form under "links" in its costs file:

    {"x": 33.5e6, "g": 33.5e6, "pairs": {"1->2": {"latency": 30, "bandwidth": 0.125}, "2->1": {...}}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbpp.error_text import did_you_mean
from zbpp.schedule import Links, PlanError
from zbpp.schedule.links import MS_PER_BYTE

_PAIR = re.compile(r"(\d+)\s*(<?->)\s*(\d+)")
_OF_BYTES, _OF_TIME = ("latency", "bandwidth"), ("latency", "busy")


def read_links(path: str) -> Links:
    """The links of a file. Raises PlanError for what is none, and OSError."""
    try:
        found = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise PlanError(f"--links {path}: there is no such file") from None
    except (ValueError, RecursionError) as error:  # also no UTF-8, too many digits, nested too deep
        raise PlanError(f"--links {path}: it is no JSON: {error}") from None
    try:
        return links_of(found)
    except PlanError as error:
        raise PlanError(f"--links {path}: {error}") from None


def links_of(found: object) -> Links:
    """The links that parsed JSON says. Raises PlanError."""
    if not isinstance(found, Mapping) or not found:
        raise PlanError('write {"latency": 0.05, "bandwidth": 12.5, "x": 33.5e6}, say')
    by_bytes = "bandwidth" in found or "x" in found
    names = _OF_BYTES if by_bytes else _OF_TIME
    _refuse_others(found, (*names, "pairs", "shared", *(("x", "g") if by_bytes else ())))
    shared = _shared(found.get("shared", False))
    usual = {name: found.get(name, 0.0) for name in names}
    pairs: dict[tuple[int, int], tuple[Any, Any]] = {}
    given = found.get("pairs") or {}
    if not isinstance(given, Mapping):
        raise PlanError(f'pairs={given}: write {{"1->2": {{{names[0]}: ..., {names[1]}: ...}}}}')
    for pair, own in given.items():
        both = _ranks(pair)
        if not both or not isinstance(own, Mapping):
            raise PlanError(
                f"pairs has {pair}: {own}: write 1->2, or 1<->2, and {{{names[0]}: ..., {names[1]}: ...}}"
            )
        _refuse_others(own, names)
        if by_bytes and "bandwidth" not in (*own, *found):
            raise PlanError(f"pairs has {pair}: {dict(own)}: it has no bandwidth; write GB/s")
        latency, other = ({**usual, **own}[name] for name in names)
        pairs |= dict.fromkeys(both, (latency, other))
    if by_bytes and found.get("bandwidth") is None:
        _check_measured(found, pairs)
        usual["bandwidth"] = None
    if not by_bytes:
        return Links(usual["latency"], usual["busy"], pairs, shared=shared)
    if not found.get("x"):
        raise PlanError("bandwidth goes with x, the bytes of a microbatch's activations")
    rates = {name: usual[name] for name in names}
    return Links.of_bytes(found["x"], found.get("g"), pairs=pairs, shared=shared, **rates)


def _ranks(pair: object) -> list[tuple[int, int]]:
    """The pairs of ranks that a text such as 1->2 or 1<->2 says; [] for another text."""
    match = _PAIR.fullmatch(str(pair))
    if match is None:
        return []
    there = int(match[1]), int(match[3])
    return [there, there[::-1]] if match[2] == "<->" else [there]


def _shared(given: object) -> bool | list[tuple[int, int]]:
    if isinstance(given, bool):
        return given
    found = [_ranks(each) for each in given] if isinstance(given, list) else []
    if not found or not all(found):
        raise PlanError(f'shared={given}: write true, or a list such as ["1->2", "1->0"]')
    return [pair for pairs in found for pair in pairs]


def written_links(links: Links) -> dict[str, Any]:
    """The JSON of links of bytes that cost nothing but for their pairs."""
    pairs = {
        f"{sender}->{receiver}": {"latency": latency, "bandwidth": MS_PER_BYTE / busy}
        for (sender, receiver), (latency, busy) in links.pairs.items()
    }
    return {"x": links.x, "g": links.g, "pairs": pairs}


def _check_measured(found: Mapping[Any, Any], pairs: Mapping[tuple[int, int], Any]) -> None:
    """Raises PlanError unless pairs says both directions of each link, and nothing is said of the others."""
    if "latency" in found or not pairs:
        raise PlanError("there is no bandwidth for every link: write bandwidth, in GB/s, or only pairs")
    for sender, receiver in pairs:
        if (receiver, sender) not in pairs:
            raise PlanError(
                f"pairs has {sender}->{receiver} and lacks {receiver}->{sender}: write both, or "
                f"{sender}<->{receiver}, or a bandwidth for every link"
            )


def _refuse_others(found: Mapping[Any, Any], names: tuple[str, ...]) -> None:
    for name in found:
        if name not in names:
            raise PlanError(f"{name} is none of {', '.join(names)}{did_you_mean(str(name), names)}")
