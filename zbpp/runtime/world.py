"""Joining and leaving the job, and agreement between its ranks.

The only caller of init_process_group. A restarted job finds the addresses of its predecessor's dead processes
in the shared store, so every start writes there under a name of its own: see joining.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zbpp.runtime.joining import job_store, join, versions
from zbpp.runtime.out_of_memory import is_out_of_memory


class AgreementError(ValueError):
    """Ranks of one job were given different things."""


class DeviceError(ValueError):
    """The device that was asked for is not there."""


class CommunicationError(RuntimeError):
    """A message did not come in time, or the rank at the other end is gone.

    On NCCL the device waits for messages, the program doesn't: at the timeout torch's watchdog ends the
    process.
    """

    @classmethod
    def at(cls, where: str, error: RuntimeError) -> Self:
        """torch's first line, without gloo's line of code and advice, behind where it was raised."""
        first_line = str(error).partition("\n")[0].partition(". This is typically")[0]
        return cls(f"{where}: " + re.sub(r"\[/\S+\.cc:\d+\] ", "", first_line))

    @property
    def is_late(self) -> bool:
        """Whether the wait lasted too long; the other end of a link that breaks is gone."""
        return "imed out" in str(self)


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int
    size: int
    device: torch.device


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group of so many processes that don't exist: collectives do nothing, and return at once."""
    # torch's own tests use this group, and torchtitan's estimates of memory.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def world(*, device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the job that torchrun started, and leave it at the end. Without torchrun: a job of one rank.

    device: "cpu" (gloo), "cuda" (NCCL) or "auto". timeout: seconds that a wait for another rank may last.
    """
    chosen = _device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "RANK" not in os.environ:
        yield World(0, 1, chosen)
        return
    store, rank, size = job_store(timeout)
    attempt = join(store, rank, size, {**versions(), "device": chosen.type}, timeout)
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=PrefixStore(f"zbpp/{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    yield World(rank, size, chosen)
    # Not after an error: it would wait for receives that no rank will answer, and hide the error.
    dist.destroy_process_group()


def _device(name: str) -> torch.device:
    """This process's device; "auto" is CUDA if every process of this machine gets a device of its own."""
    # If NCCL's first receive runs before the first kernel is loaded, lazy loading waits for that receive.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # A waiting receive holds up all streams that share its hardware queue; by default there are 8 queues.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device={name!r}: write cpu, cuda or auto")
    needed, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if name == "cuda" and found < needed:
        built = "" if torch.version.cuda else " and is built without CUDA"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        fewer = f"start {found} process(es), or " if found else ""
        raise DeviceError(
            f"device=cuda: {needed} process(es) here, but torch sees {found} CUDA device(s){limited}{built}; "
            f"{fewer}write device=cpu"
        )
    if name == "cpu" or found < needed:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with communicating(f"rank {dist.get_rank(group)}, gathering from all ranks"):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    with communicating(f"rank {dist.get_rank(group)}, broadcast from rank 0"):
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


@contextmanager
def communicating(where: str) -> Iterator[None]:
    """Turn torch's RuntimeError for a broken connection or a timeout into a CommunicationError at `where`.

    torch's is not shown besides: its text is gloo's advice, its stack zbpp's own.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise CommunicationError.at(where, error) from None


def check_agreement(
    what: str, value: Any, group: dist.ProcessGroup | None = None, ranks: Sequence[int] | None = None
) -> None:
    """Raise AgreementError on EVERY rank, with the difference, unless all have the same value. Collective.

    ranks: the numbers by which the error calls the group's processes; None: their ranks in the group.
    """
    check_equal(what, gather(value, group), ranks)


def check_equal(what: str, values: Sequence[Any], ranks: Sequence[int] | None = None) -> None:
    """Raise AgreementError, with the difference, unless all ranks have the same value.

    values: per rank; ranks: their numbers, None for 0, 1, ... Dicts are compared key by key.
    """
    numbers = range(len(values)) if ranks is None else ranks
    if all(_is_same(each, values[0]) for each in values):
        return
    if isinstance(values[0], dict):
        keys = sorted({key for each in values for key in each}, key=str)
        columns = {key: [each.get(key, "(nothing)") for each in values] for key in keys}
        text = "\n".join(
            f"  {key}: {_by_rank(column, numbers)}"
            for key, column in columns.items()
            if not all(_is_same(each, column[0]) for each in column)
        )
    else:
        text = "  " + _by_rank(values, numbers)
    raise AgreementError(f"the ranks of this job have different {what}:\n{text}")


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals itself."""
    return bool(one == other) or repr(one) == repr(other)


def _by_rank(values: Sequence[Any], ranks: Sequence[int]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(repr(value), []).append(rank)
    return "; ".join(f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in groups.items())
