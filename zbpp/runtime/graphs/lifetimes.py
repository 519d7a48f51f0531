"""How long a message's memory is in use, in instructions of the program; which messages can share memory.

    message            in use from                   to
    received           where its receive is posted   the last action of its stage and microbatch
    kept on this rank  the action that produces it   the last action of its stage and microbatch
    sent               the action that produces it   its Release, or the end of the program

A received x is in use until W, since W's x may BE the received x. The same holds for a g. A link posts
receives ahead: message n when message n - depth is received, or at the beginning (-1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from zbpp.schedule import Action, Program, Recv, Release, Send, Value, consumes, produces

_Key = TypeVar("_Key", bound=Hashable)


class Life(NamedTuple):
    """The instructions during which memory is in use, both included. -1: from before the first one."""

    begin: int
    end: int


def lives(program: Program, num_stages: int) -> dict[Value, Life]:
    """The life of each x and g that an action of this rank takes or gives."""
    begins, ends = _posts(program), _releases(program)
    last = {
        (each.stage, each.microbatch): place
        for place, each in enumerate(program.instructions)
        if isinstance(each, Action)
    }
    for place, each in enumerate(program.instructions):
        if isinstance(each, Action):
            begins |= dict.fromkeys(messages_of(produces(each, num_stages)), place)
            ends |= {value: last[value.stage, value.microbatch] for value in messages_of(consumes(each))}
    return {value: Life(begin, ends[value]) for value, begin in begins.items() if value in ends}


def messages_of(values: tuple[Value, ...]) -> list[Value]:
    """Those values that pass between stages."""
    return [value for value in values if value.name in ("x", "g")]


def _posts(program: Program) -> dict[Value, int]:
    """Where the receive of each message is posted."""
    places: dict[int, list[int]] = defaultdict(list)
    posts: dict[Value, int] = {}
    for place, each in enumerate(program.instructions):
        if isinstance(each, Recv):
            depth = max(program.in_flight[each.peer], 1)
            before = places[each.peer]
            posts[each.value] = before[len(before) - depth] if len(before) >= depth else -1
            before.append(place)
    return posts


def _releases(program: Program) -> dict[Value, int]:
    """Where the memory of each sent message is released: a link releases in the order of its sends."""
    waiting: dict[int, list[Value]] = defaultdict(list)
    ends: dict[Value, int] = {}
    for place, each in enumerate(program.instructions):
        if isinstance(each, Send):
            waiting[each.peer].append(each.value)
        elif isinstance(each, Release):
            ends[waiting[each.peer].pop(0)] = place
    left = (value for values in waiting.values() for value in values)
    return ends | dict.fromkeys(left, len(program.instructions))


def share(lives: Mapping[_Key, Life]) -> dict[_Key, int]:
    """The number of the memory that each key gets; keys whose lives overlap get different ones.

    The fewest numbers that do: lives are intervals, and each takes the number that has been free longest.
    """
    numbers: dict[_Key, int] = {}
    in_use: list[tuple[int, int]] = []  # (end of the life, number)
    count = 0
    for key, life in sorted(lives.items(), key=lambda each: each[1]):
        if in_use and in_use[0][0] < life.begin:
            _, number = heappop(in_use)
        else:
            number, count = count, count + 1
        numbers[key] = number
        heappush(in_use, (life.end, number))
    return numbers
