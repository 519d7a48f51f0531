"""Joining and leaving the job.

The only caller of init_process_group. A restarted job finds the addresses of its predecessor's dead processes
in the shared store, so every start writes there under a name of its own: see joining.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zbpp.job.cuda_settings import use_expandable_segments
from zbpp.job.joining import job_store, join, versions


class DeviceError(ValueError):
    """The device that was asked for is not there."""


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
        use_expandable_segments()
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
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_device(name, needed)
    if name == "cpu" or torch.cuda.device_count() < needed:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_device(name: str, needed: int) -> None:
    """Raise DeviceError if device=cuda, and this machine has no device for each of so many processes."""
    if name not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device={name!r}: write cpu, cuda or auto")
    if name == "cuda" and (found := torch.cuda.device_count()) < needed:
        built = "" if torch.version.cuda else " and is built without CUDA"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        fewer = f"start {found} process(es), or " if found else ""
        raise DeviceError(
            f"device=cuda: {needed} process(es) here, but torch sees {found} CUDA device(s){limited}{built}; "
            f"{fewer}write device=cpu"
        )
