"""Links whose messages carry checksums: computed by the sender, compared by the receiver.

Behind the tensors of a message comes one number. It covers the tensors' bits, the layout, the channel and the
message's number in its pass: so a changed message, a wrong one and one out of order are all seen. A header
carries a checksum of its own in its last place, since the receiver makes buffers of the sizes in it.

On the CPU a message is compared when it is received, before a stage sees it. On CUDA the comparison stays on
the device, and the host looks once, at the end of the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from zbpp.runtime.check_counts import CheckCounts
from zbpp.runtime.checksums import checksum
from zbpp.runtime.layout import HEADER_SIZE, Layout, Message, decode, encode, layout_of
from zbpp.runtime.p2p import Inbox, Outbox, Posted
from zbpp.runtime.world import CorruptionError
from zbpp.seeding import seed_of


def message_checksum(channel: Hashable, number: int, message: Message, device: torch.device) -> Tensor:
    """int64[1] on the device. number: of the message in its pass over the link."""
    total = torch.full((1,), _salt(channel, number, layout_of(message)), dtype=torch.int64, device=device)
    for place, tensor in enumerate(message):
        if tensor is not None:
            total += checksum(tensor) * (2 * place + 1)
    return total


def _salt(channel: Hashable, number: int, layout: Layout) -> int:
    return (_salt_of(channel, layout) + number * 0x9E3779B97F4A7C1) % 2**63


@lru_cache(maxsize=1024)
def _salt_of(channel: Hashable, layout: Layout) -> int:
    return seed_of(repr(channel), repr(layout))


def sealed(layout: Layout) -> Tensor:
    """The header of a layout, whose last place holds a checksum of the others."""
    header = encode(layout)
    if header[-1]:
        raise ValueError(f"{len(layout)} tensors pass between two stages: too many for a header; stack some")
    header[-1] = checksum(header[:-1])
    return header


def unsealed(header: Tensor) -> Layout | None:
    """The layout in a header, or None if the header has changed on its way."""
    header = header.cpu()
    if len(header) != HEADER_SIZE or header[-1] != checksum(header[:-1]):
        return None
    return decode(torch.cat([header[:-1], header.new_zeros(1)]))


@dataclass(eq=False)
class CheckedOutbox(Outbox):
    """An Outbox that sends a checksum behind each message."""

    _number: int = 0  # of the next message in this pass

    def send(self, channel: Hashable, message: Message) -> None:
        """See Outbox."""
        # Before the message is sent: a change of its memory while it is under way is seen, too.
        proof = message_checksum(channel, self._number, message, self.device)
        self._number += 1
        super().send(channel, message)
        self._pending[-1].append(self._start(proof))

    def finish(self) -> None:
        """See Outbox."""
        super().finish()
        self._number = 0

    def _header(self, layout: Layout) -> Tensor:
        return sealed(layout)


@dataclass(eq=False)
class CheckedInbox(Inbox):
    """An Inbox that compares the checksum of each message.

    names: of each message of a pass, such as `x(1,3) from rank 0 to rank 1`. when: the call that runs, such
    as `in step 5`. is_late: compare on the device, and let `verify` look; None: on CUDA. counts: where equal
    messages are counted.
    Raises CorruptionError.
    """

    names: Sequence[str] = ()
    when: Callable[[], str] = str
    is_late: bool | None = None
    counts: CheckCounts = field(default_factory=CheckCounts)
    _proofs: deque[Tensor] = field(default_factory=deque)  # of the messages that are posted
    _number: int = 0  # of the next message in this pass
    _differences: list[Tensor] = field(default_factory=list)  # of this pass's messages, on the device

    def __post_init__(self) -> None:
        if self.is_late is None:
            self.is_late = self.pool.device.type == "cuda"

    def begin(self, num_messages: int | None = None) -> None:
        """See Inbox."""
        self._number = 0
        self._differences.clear()
        super().begin(num_messages)

    def receive(self) -> Message:
        """See Inbox."""
        message = super().receive()
        own = message_checksum(self.channels[self._number], self._number, message, self.pool.device)
        difference = own != self._proofs.popleft()
        self._number += 1
        if self.is_late:
            self._differences.append(difference)
        elif difference.item():
            raise self._error(self._number - 1)
        else:
            self.counts.messages += 1
        return message

    def verify(self) -> None:
        """At the end of a pass: raise CorruptionError if a message had changed. Waits for the device."""
        if self._differences:
            found = torch.cat(self._differences).tolist()
            self._differences.clear()
            if any(found):
                raise self._error(found.index(True))
            self.counts.messages += len(found)

    def close(self) -> None:
        """See Inbox."""
        self._proofs.clear()
        super().close()

    def _post(self, channel: Hashable, layout: Layout | None) -> Posted:
        posted = super()._post(channel, layout)
        if layout is not None:
            proof = torch.empty(1, dtype=torch.int64, device=self.pool.device)
            posted.works.append(self._start(proof))
            self._proofs.append(proof)
        return posted

    def _layout_in(self, header: Tensor) -> Layout:
        layout = unsealed(header)
        if layout is None:
            raise self._error(self._number)
        return layout

    def _error(self, number: int) -> CorruptionError:
        return CorruptionError(
            f"{self.names[number]} has changed on its way, {self.when()}: the receiver's checksum differs "
            "from the sender's. Memory or network of one of the two machines is at fault, or a stage changed "
            "a tensor in place that it had returned; the weights of before this step are good"
        )
