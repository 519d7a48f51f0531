"""Joining and leaving the job.

The only caller of init_process_group. A restarted job finds the addresses of its predecessor's dead processes
in the shared store, so every start writes there under a name of its own: see joining.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zbpp.devices import accelerator_name, is_accelerator, make_current, num_devices
from zbpp.job.cuda_settings import use_expandable_segments
from zbpp.job.joining import job_store, join, versions

_log = logging.getLogger(__name__)


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

    device: "cpu" (gloo), "cuda" (NCCL) or another accelerator's name, or "auto": the accelerator if there is
    one. timeout: seconds that a wait for another rank may last.
    """
    chosen = own_device(device)
    if is_accelerator(chosen):
        make_current(chosen)
        use_expandable_segments()
    if "RANK" not in os.environ:
        yield World(0, 1, chosen)
        return
    store, rank, size = job_store(timeout)
    attempt = join(store, rank, size, {**versions(), "device": chosen.type}, timeout)
    dist.init_process_group(
        dist.get_default_backend_for_device(chosen),
        store=PrefixStore(f"zbpp/{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    yield World(rank, size, chosen)
    # Not after an error: it would wait for receives that no rank will answer, and hide the error.
    dist.destroy_process_group()


def own_device(name: str) -> torch.device:
    """This process's device; "auto" is the accelerator's if every process of this machine gets its own."""
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    place = int(os.environ.get("LOCAL_RANK", "0"))
    check_device(name, needed)
    if name == "auto":
        name = accelerator_name() or "cpu"
        found = num_devices(name)
        if found < needed and found:
            if not place:
                _log.warning("device=auto: %s, so all of them run on the CPU", _too_few(name, needed, found))
            name = "cpu"
    return torch.device(name) if name == "cpu" else torch.device(name, place)


def check_device(name: str, needed: int) -> None:
    """Raise DeviceError if this machine has no device of that name for each of so many processes."""
    if name in ("cpu", "auto"):
        return
    try:
        torch.device(name, 0)
    except RuntimeError:
        known = "cpu, auto or what torch calls an accelerator, such as cuda"
        raise ValueError(f"device={name!r}: write {known}") from None
    found = num_devices(name)
    if found < needed:
        fewer = f"start {found} process(es), or " if found else ""
        raise DeviceError(f"device={name}: {_too_few(name, needed, found)}; {fewer}write device=cpu")


def _too_few(name: str, needed: int, found: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    built = "" if is_accelerator(torch.device(name)) else f" and is built without {name.upper()}"
    return f"{needed} process(es) here, but torch sees {found} {name.upper()} device(s){limited}{built}"
