"""EMULATED links: every message takes a given time at least, whichever runtime sends it.

The sender's clock travels with each message. A wait for the message lasts until that time plus the delay,
and occupies its rank no more than waiting for a slow network would. It works on gloo only, and on one
machine, whose processes share a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FIRST_STAMP_TAG = 2**30  # the messages that carry the clock have tags from here on


@contextmanager
def delayed_messages(milliseconds: float) -> Iterator[None]:
    """Inside, no message between two ranks arrives earlier than this after it was sent; 0: no delay."""
    if not milliseconds:
        yield
        return
    group = dist.ProcessGroup
    send, recv = group.send, group.recv
    methods = {name: vars(group)[name] for name in ("send", "recv")}  # descriptors, unlike send and recv

    def stamped(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        stamp = torch.tensor([time.perf_counter()], dtype=torch.float64)
        return _Pair(send(self, [stamp], peer, _FIRST_STAMP_TAG + tag), send(self, tensors, peer, tag))

    def delayed(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        stamp = torch.zeros(1, dtype=torch.float64)
        works = recv(self, [stamp], peer, _FIRST_STAMP_TAG + tag), recv(self, tensors, peer, tag)
        return _Pair(*works, lambda: sleep_until(float(stamp) + milliseconds / 1e3))

    group.send, group.recv = stamped, delayed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(group, name, method)


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
    """Sleep until the clock (time.perf_counter) shows `moment`, in s."""
    time.sleep(max(0.0, moment - time.perf_counter()))
