"""Inserts a Post, which starts a receive, for each Recv of a program.

On gloo a receive that has started is a buffer in host memory. It delays nothing, so a rank starts receives
ahead, as many as the plan has messages in flight:

    in_flight       Post g(0,0)  Post g(0,1)  0F0 ... 0F1  Post g(0,2)  Recv g(0,0)  0B0  0F2 ...

On NCCL a receive is a kernel. It occupies the device from its start until its message is there. A send is a
kernel, too, until its receive has started. Some operations wait until every kernel on the device has ended:
the first matrix product, the loading or tuning of a kernel, giving memory back. So they wait for sends and
receives, too. Two neighbours may wait so at once. If each starts what the other one needs only after its own
wait, neither goes on. So in a step whose actions may wait for the device, a rank receives each value before
its first action that begins, in a timeline, when the value has been sent. The timeline is that of lower.py:
F, B and W take one unit of time, messages take none.

    time            0    1    2    3    4    5
    rank 0          0F0  0F1  0F2  0B0 ...               g(0,0) is sent at time 3, by 1B0
    rank 1               1F0  1B0  1F1 ...               x(1,1) is sent at time 2, by 0F1

    when_sent       1F0  Post x(1,1)  Recv x(1,1)  1B0  Send g(0,0)  1F1
    too late        1F0  1B0  Send g(0,0)  Post x(1,1)  Recv x(1,1)  1F1

Too late, because 1B0 may wait for the device, and 0F2 may, behind the send of x(1,1). In the first line an
action that begins at time t waits for nothing but messages whose send and receive have started once all
actions that begin before t have run, on any rank. So such waits can't form a circle, wherever they are.

In the steps that follow nothing waits for the device, unless stages are compiled: a shape that is new to a
compiler is compiled, and tuned, when it comes. Without compiled stages each receive then starts one action
earlier, and the message travels during that action:

    one_ahead       Post x(1,1)  1F0  1B0  Send g(0,0)  Recv x(1,1)  1F1

A program may have a fence: until it has passed its fence, it may be run again from its beginning. A receive
that has started can't be taken back. So if a message is sent behind the sender's fence, its receiver starts
the receive behind its own fence.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zbpp.schedule.program import Instruction, Post, Program, Recv, Reduce, Release, Send
from zbpp.schedule.timetable import Action

Posting = Callable[[Program], Program]
"""One of the three passes below."""


class Fence(NamedTuple):
    """The place in a program up to which it may be run again; an instruction with `fence` stands there.

    position: the position of the first action behind the fence, in the rank's row; the row's length if no
        action follows.
    sent: {sender: the number of messages that the sender sends to this rank before the sender's fence}.
    dropped: one sender for each message that is sent before the sender's fence, and received behind this
        rank's. A rank that runs its program again first receives and drops these messages, in this order.
    """

    position: int
    sent: dict[int, int]
    dropped: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.position, self.dropped))


_CORE = Action | Post | Recv | Send | Release | Reduce
_BEFORE_POSTS = Send | Reduce | Release
Inserted = Mapping[int, Sequence[Instruction]]
"""{a number of actions: the instructions behind so many actions, before the Recvs of the next action}."""


def in_flight(program: Program) -> Program:
    """A program that keeps as many receives started as the plan has in flight, beside the awaited one."""
    inserted, fence = defaultdict[int, list[Instruction]](list), fence_of(program)
    for peer, receives in _receives(program).items():
        depth = max(program.in_flight[peer], 1)
        for number, (_, recv) in enumerate(receives):
            position = 0 if number < depth else receives[number - depth][0]
            inserted[_behind_fence(position, number, peer, fence)].append(Post(*recv))
    return _assembled(program, inserted)


def one_ahead(program: Program) -> Program:
    """A program whose receives start one action before the value has been sent in the unit timeline."""
    inserted, fence = defaultdict[int, list[Instruction]](list), fence_of(program)
    for position, number, recv in _in_order_of_sends(program):
        place = _behind_fence(max(position - 1, 0), number, recv.peer, fence)
        inserted[place].append(Post(*recv))
    return _assembled(program, inserted)


def when_sent(program: Program) -> Program:
    """A program that starts and takes each receive where the value has been sent in the unit timeline."""
    inserted, before_fence = defaultdict[int, list[Instruction]](list), list[Instruction]()
    fence = fence_of(program)
    for position, number, recv in _in_order_of_sends(program):
        both = Post(*recv), recv
        # A sender whose device waits comes to its fence only once all that it has sent before is received.
        if fence is not None and position >= fence.position and number < fence.sent.get(recv.peer, 0):
            before_fence += both
        else:
            inserted[_behind_fence(position, number, recv.peer, fence)] += both
    others = tuple([each for each in program.instructions if not isinstance(each, Recv)])
    return _assembled(program._replace(instructions=others), inserted, before_fence)


def fence_of(program: Program) -> Fence | None:
    """The fence of a program; None if it has none."""
    return next((fence for _, fence in _fences(program)), None)


def _fences(program: Program) -> Iterator[tuple[int, Fence]]:
    """Yield the places of the instructions with a fence, and their fences."""
    for place, each in enumerate(program.instructions):
        # The type is asked first: looking for an attribute that is not there takes longer.
        if not isinstance(each, _CORE) and hasattr(each, "fence"):
            yield place, each.fence


def unreceived(program: Program) -> list[Recv]:
    """The messages that are sent before their senders' fences, and that are received behind this rank's.

    In the order in which a rank that runs its program again receives and drops them.
    """
    place, fence = next(_fences(program))
    before, behind = (
        [each for each in part if isinstance(each, Recv)]
        for part in (program.instructions[:place], program.instructions[place:])
    )
    received = Counter(each.peer for each in before)
    left = {peer: deque(each for each in behind if each.peer == peer) for peer in fence.sent}
    num_left = {peer: number - received[peer] for peer, number in fence.sent.items()}
    return [left[peer].popleft() for peer in fence.dropped if num_left[peer] > 0]


def _receives(program: Program) -> dict[int, list[tuple[int, Recv]]]:
    """By sender: each Recv with the number of actions before it."""
    found, position = defaultdict[int, list[tuple[int, Recv]]](list), 0
    for each in program.instructions:
        position += isinstance(each, Action)
        if isinstance(each, Recv):
            found[each.peer].append((position, each))
    return found


def _in_order_of_sends(program: Program) -> list[tuple[int, int, Recv]]:
    """Each Recv: the number of actions that begin before its value is sent, and its number on its link."""
    receives, taken, found = _receives(program), Counter[int](), list[tuple[int, int, Recv]]()
    positions = program.positions()
    for place, peer in program.sent:
        found.append((positions[place], taken[peer], receives[peer][taken[peer]][1]))
        taken[peer] += 1
    return found


def _behind_fence(position: int, number: int, peer: int, fence: Fence | None) -> int:
    """The position, moved behind the fence if the message is sent behind the sender's fence."""
    if fence is None or number < fence.sent.get(peer, 0):
        return position
    return max(position, fence.position)


def _is_before_posts(instruction: Instruction) -> bool:
    return isinstance(instruction, _BEFORE_POSTS) or (
        not isinstance(instruction, _CORE) and hasattr(instruction, "fence")
    )


def _assembled(program: Program, inserted: Inserted, before_fence: Sequence[Instruction] = ()) -> Program:
    """The program with the inserted instructions. before_fence: those directly before its fence."""
    found, between, position = list[Instruction](), list[Instruction](), 0

    def end_of_between() -> None:
        ends = [place for place, each in enumerate(between, 1) if _is_before_posts(each)]
        last = ends[-1] if ends else 0
        for each in between[:last]:
            found.extend([*before_fence, each] if before_fence and hasattr(each, "fence") else [each])
        rest = between[last:]
        first = next((place for place, each in enumerate(rest) if isinstance(each, Recv)), len(rest))
        found.extend([*rest[:first], *inserted.get(position, ()), *rest[first:]])

    for each in program.instructions:
        if isinstance(each, Action):
            end_of_between()
            found.append(each)
            between, position = [], position + 1
        else:
            between.append(each)
    end_of_between()
    return program._replace(instructions=tuple(found))


class Postings(NamedTuple):
    """Where receives start: in a step whose actions may wait for the whole device, and in other steps."""

    may_wait: Posting
    later: Posting


ON_HOST = Postings(in_flight, in_flight)
"""For links whose receives don't run on the device: gloo's."""
ON_DEVICE = Postings(when_sent, one_ahead)
"""For links whose receives are kernels: NCCL's."""
