"""More messages under way on each link, for links with a long latency.

A program counts the messages in flight as if they took no time: as many receives have started, and a Release
waits for a message of as many sends ago. Over a long latency that is too few. gloo begins to send when the
sender knows that the receive has started, and a Release waits for the way there and back:

    as lowered     Send x(1,2)  Release x(1,0)  0F3  Send x(1,3)  Release x(1,1)  ...
    one ahead      Send x(1,2)                  0F3  Send x(1,3)  Release x(1,0)  ...

Fewer and later waits form no circle where there was none. Values and their order on each link stay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from zbpp.runtime.extra import Feature
from zbpp.runtime.rank import Rank
from zbpp.schedule import Program, Release
from zbpp.schedule.program import Instruction


def with_more_in_flight(program: Program, number: int) -> Program:
    """A program whose links hold so many messages more. The end of a step releases the last ones."""
    held, found = defaultdict[int, deque[Release]](deque), list[Instruction]()
    for each in program.instructions:
        if not isinstance(each, Release):
            found.append(each)
            continue
        held[each.peer].append(each)
        if len(held[each.peer]) > number:
            found.append(held[each.peer].popleft())
    in_flight = {peer: most + number for peer, most in program.in_flight.items()}
    return program._replace(instructions=tuple(found), in_flight=in_flight)


@dataclass
class MessagesAhead(Feature):
    """Lets each link hold `number` messages more, for links with a long latency: an extra.

    number: as many as a rank sends over the link in a round trip; 0: none yet, see `change`. Each costs the
    memory of a message, on the sender and on the receiver. Results stay equal to the last bit. With receives
    on the device (NCCL) only senders' waits come later. Raises ValueError for a number below 0.
    """

    name = "messages_ahead"

    number: int

    def __post_init__(self) -> None:
        if not isinstance(self.number, int) or self.number < 0:
            raise ValueError(f"number={self.number!r}: write how many messages more, from 0")

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank = rank

    def change(self, number: int) -> None:
        """Let each link hold another number of messages more, from the next call on."""
        self.number = number
        self._rank.rebind()

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        return with_more_in_flight(program, self.number)
