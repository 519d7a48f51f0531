"""EMULATED slow links: each message waits in a thread before gloo gets it.

As `Links` say, a message occupies its link for a while, and arrives a latency later. So a pipeline over slow
links shows its true shape on one machine. Reports with figures of such links say that they are emulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.measure import link_times
from zbpp.runtime import rank as runtime_rank
from zbpp.runtime.host_links import LinkGroup, Started
from zbpp.schedule import Links


class DelayedLink:
    """The sender's end of a link, in the place of its process group. latency, busy: ms.

    nbytes: of the message that occupies the link for `busy`; None: each message does.
    """

    def __init__(self, group: Any, latency: float, busy: float, nbytes: int | None = None) -> None:
        self._group, self._latency, self._busy = group, latency / 1e3, busy / 1e3
        self._nbytes = nbytes
        self._free = 0.0  # when the link is
        self._thread = ThreadPoolExecutor(1, "delayed link")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Delayed:
        """Start to send; see LinkGroup."""
        kept = [each.clone() for each in tensors]  # their owner may change them once they have gone out
        self._free = max(time.perf_counter(), self._free) + self._busy * self._share(kept)
        return _Delayed(self._thread.submit(self._go, self._free + self._latency, kept, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Started:
        """See LinkGroup."""
        started: Started = self._group.recv(tensors, peer, tag)
        return started

    def _share(self, tensors: list[Tensor]) -> float:
        return 1.0 if self._nbytes is None else sum(each.nbytes for each in tensors) / self._nbytes

    def _go(self, due: float, tensors: list[Tensor], peer: int, tag: int) -> Started:
        time.sleep(max(0.0, due - time.perf_counter()))
        started: Started = self._group.send(tensors, peer, tag)
        return started


class _Delayed:
    """A message that waits, or is under way."""

    def __init__(self, future: Future[Started]) -> None:
        self._future = future

    def wait(self, limit: timedelta, /) -> Any:
        return self._future.result().wait(limit)


@contextmanager
def delayed_links(links: Links, nbytes: int | None = None) -> Iterator[None]:
    """Within the block, a Pipeline is made, and links are measured, with links that are so slow.

    links: of the ranks in the pipeline; each has a card of its own. nbytes: of the message that occupies a
    link for its `busy`, a longer one for longer; None: every message does.
    """
    made = {name: getattr(runtime_rank, name) for name in ("link_groups", "close_groups", "runs_on_device")}

    def slow(*args: Any, **kwargs: Any) -> dict[tuple[int, int], LinkGroup]:
        groups = made["link_groups"](*args, **kwargs)
        return {pair: _delayed(pair, group, links, nbytes) for pair, group in groups.items()}

    def closed(groups: Iterable[Any]) -> None:
        made["close_groups"]([_group_of(each) for each in groups])

    def on_device(link: Any, device: torch.device) -> bool:
        return bool(made["runs_on_device"](_group_of(link), device))

    with (
        patch.multiple(runtime_rank, link_groups=slow, close_groups=closed, runs_on_device=on_device),
        patch.multiple(link_times, link_groups=slow, close_groups=closed),
    ):
        yield


def _delayed(pair: tuple[int, int], group: Any, links: Links, nbytes: int | None) -> LinkGroup:
    latency, busy = links.of(*pair)
    return DelayedLink(group, latency, busy, nbytes) if latency or busy else group


def _group_of(group: Any) -> dist.ProcessGroup:
    made: dist.ProcessGroup = group._group if isinstance(group, DelayedLink) else group
    return made
