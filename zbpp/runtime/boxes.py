"""The ends of a rank's links: an inbox for each rank that sends here, an outbox for each that is sent to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from zbpp.runtime.p2p import BufferPool, Inbox, Outbox
from zbpp.schedule import Program, Recv, Send, Value

Links = Mapping[tuple[int, int], dist.ProcessGroup]  # (sender, receiver) -> group


def channel_of(value: Value) -> tuple[str, int]:
    """The x of one stage, or its g: messages of one channel have one layout."""
    return value.name, value.stage


def make_inboxes(
    program: Program, links: Links, pool: BufferPool, *, dynamic_shapes: bool
) -> dict[int, Inbox]:
    """By sender."""
    rank = program.rank
    receives = [each for each in program.instructions if isinstance(each, Recv)]
    boxes: dict[int, Inbox] = {}
    for peer in sorted({each.peer for each in receives}):
        own = int(peer > rank)  # a link's group has two ranks: 0 is the lower one
        channels = [channel_of(each.value) for each in receives if each.peer == peer]
        boxes[peer] = Inbox(own, links[peer, rank], pool, channels, program.in_flight[peer], dynamic_shapes)
    return boxes


def make_outboxes(
    program: Program, links: Links, device: torch.device, *, dynamic_shapes: bool
) -> dict[int, Outbox]:
    """By receiver."""
    rank = program.rank
    peers = sorted({each.peer for each in program.instructions if isinstance(each, Send)})
    return {peer: Outbox(int(peer > rank), links[rank, peer], device, dynamic_shapes) for peer in peers}
