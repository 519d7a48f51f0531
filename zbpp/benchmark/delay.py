"""EMULATED links: every message takes a given time at least, whichever runtime sends it.

The sender's clock travels with each message, and whoever waits for the message waits until that time
plus the delay. A wait occupies its rank no more than waiting for a slow network would. On gloo alone,
and with one clock, which the processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_STAMPS = 2**30  # tags of the messages with the clock begin here


@contextmanager
def delayed_messages(milliseconds: float) -> Iterator[None]:
    """Inside, what one rank sends to another arrives no sooner than that; 0: as soon as it does."""
    if not milliseconds:
        yield
        return
    group = dist.ProcessGroup
    send, recv = group.send, group.recv

    def stamped(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        stamp = torch.tensor([time.perf_counter()], dtype=torch.float64)
        return _Pair(send(self, [stamp], peer, _STAMPS + tag), send(self, tensors, peer, tag))

    def delayed(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        stamp = torch.zeros(1, dtype=torch.float64)
        works = recv(self, [stamp], peer, _STAMPS + tag), recv(self, tensors, peer, tag)
        return _Pair(*works, lambda: sleep_until(float(stamp) + milliseconds / 1e3))

    group.send, group.recv = stamped, delayed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        group.send, group.recv = send, recv  # type: ignore[method-assign]


class _Pair:
    """The Work of a message and of its sender's clock, as one."""

    def __init__(self, stamp: Any, message: Any, then: Callable[[], None] = lambda: None) -> None:
        self._stamp, self._message, self._then = stamp, message, then

    def wait(self, *timeout: Any) -> bool:
        self._stamp.wait(*timeout)
        done: bool = self._message.wait(*timeout)
        self._then()
        return done


def sleep_until(moment: float) -> None:
    """Until the clock shows `moment`, in s."""
    time.sleep(max(0.0, moment - time.perf_counter()))
