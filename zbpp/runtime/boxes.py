"""The ends of a rank's links: an inbox for each rank that sends here, an outbox for each that is sent to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from zbpp.runtime.check_counts import MessageChecks
from zbpp.runtime.checked_links import CheckedInbox, CheckedOutbox
from zbpp.runtime.p2p import BufferPool, Inbox, Outbox
from zbpp.schedule import Program, Recv, Send, Value

Links = Mapping[tuple[int, int], dist.ProcessGroup]  # (sender, receiver) -> group


def channel_of(value: Value) -> tuple[str, int]:
    """The x of one stage, or its g: messages of one channel have one layout."""
    return value.name, value.stage


def make_inboxes(
    program: Program, links: Links, pool: BufferPool, checks: MessageChecks | None, *, dynamic_shapes: bool
) -> dict[int, Inbox]:
    """By sender. checks: gives messages checksums; None: no checksums."""
    rank = program.rank
    receives = [each for each in program.instructions if isinstance(each, Recv)]
    boxes: dict[int, Inbox] = {}
    for peer in sorted({each.peer for each in receives}):
        mine = [each.value for each in receives if each.peer == peer]
        own = int(peer > rank)  # a link's group has two ranks: 0 is the lower one
        channels, in_flight = list(map(channel_of, mine)), program.in_flight[peer]
        end = own, links[peer, rank], pool, channels, in_flight, dynamic_shapes
        if checks is None:
            boxes[peer] = Inbox(*end)
        else:
            boxes[peer] = box = CheckedInbox(*end, when=checks.when, counts=checks.counts)
            box.names = [f"{value} from rank {peer} to rank {rank}" for value in mine]
    return boxes


def make_outboxes(
    program: Program,
    links: Links,
    device: torch.device,
    checks: MessageChecks | None,
    *,
    dynamic_shapes: bool,
) -> dict[int, Outbox]:
    """By receiver. Arguments as in make_inboxes."""
    rank, make = program.rank, Outbox if checks is None else CheckedOutbox
    peers = sorted({each.peer for each in program.instructions if isinstance(each, Send)})
    return {peer: make(int(peer > rank), links[rank, peer], device, dynamic_shapes) for peer in peers}
