"""Rendezvous, process groups, timeouts, agreement between ranks.

The only caller of init_process_group. A restarted job finds the dead addresses of its
predecessor in the shared store, so every start uses a name of its own there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


class AgreementError(ValueError):
    """Ranks of one job were given different things."""


class CommunicationError(RuntimeError):
    """A message did not come in time, or its peer is gone."""

    @classmethod
    def at(cls, where: str, error: RuntimeError) -> Self:
        """What torch said, and where it was."""
        first_line = str(error).partition("\n")[0]
        return cls(f"{where}: {first_line}")


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int
    size: int
    device: torch.device


@contextmanager
def world(*, device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the job that torchrun (or nobody: one rank) started, and leave it at the end.

    device: "cpu" (gloo), "cuda" (NCCL) or "auto". timeout in seconds: of every wait.
    """
    chosen = _device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "RANK" not in os.environ:
        yield World(0, 1, chosen)
        return
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=torch._C._distributed_c10d.PrefixStore(f"zbpp/{_attempt(store, rank)}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield World(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: write cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA device here; write device=cpu")
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device("cpu")
    )


def _attempt(store: Any, rank: int) -> str:
    # On several nodes the agents don't agree on the restart count: rank 0's is the one.
    key = f"zbpp/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(key, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return str(store.get(key).decode())


def direction_groups(
    group: dist.ProcessGroup | None, timeout: float | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(lower to higher rank, higher to lower): one communicator each."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    limit = None if timeout is None else timedelta(seconds=timeout)
    up, down = (
        dist.new_group(ranks, timeout=limit, use_local_synchronization=True, group_desc=f"zbpp_{name}")
        for name in ("up", "down")
    )
    return up, down


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


def sum_over_ranks(
    numbers: list[float], device: torch.device, group: dist.ProcessGroup | None
) -> list[float]:
    """The sums over all ranks in float64, on every rank; `device` is one that the group can reach."""
    vector = torch.tensor(numbers, dtype=torch.float64, device=device)
    with communicating(f"rank {dist.get_rank(group)}, sum over all ranks"):
        dist.all_reduce(vector, group=group)
    result: list[float] = vector.tolist()
    return result


@contextmanager
def communicating(where: str) -> Iterator[None]:
    """Turn torch's RuntimeError of a broken connection or a timeout into one that says where it was."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError.at(where, error) from error


def check_agreement(what: str, value: Any, group: dist.ProcessGroup | None = None) -> None:
    """Raise AgreementError on EVERY rank, with the difference, unless all have the same value.

    Dicts are compared key by key.
    """
    values = gather(value, group)
    if all(each == values[0] for each in values):
        return
    if isinstance(value, dict):
        keys = sorted({key for each in values for key in each}, key=str)
        columns = {key: [each.get(key, "(nothing)") for each in values] for key in keys}
        text = "\n".join(
            f"  {key}: {_by_rank(column)}"
            for key, column in columns.items()
            if any(each != column[0] for each in column)
        )
    else:
        text = "  " + _by_rank(values)
    raise AgreementError(f"the ranks of this job have different {what}:\n{text}")


def _by_rank(values: list[Any]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), []).append(rank)
    return "; ".join(f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in groups.items())
