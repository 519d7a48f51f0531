"""Rendezvous, process groups, timeouts, agreement between ranks.

The only caller of init_process_group. A restarted job finds the dead addresses of its
predecessor in the shared store, so every start uses a name of its own there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._C._distributed_c10d import Store as Store  # for others to name
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


class AgreementError(ValueError):
    """Ranks of one job were given different things."""


class DeviceError(ValueError):
    """The device that was asked for is not there."""


class CommunicationError(RuntimeError):
    """A message did not come in time, or its peer is gone.

    On NCCL only the device waits, not the program: there torch's watchdog ends the process at the timeout.
    """

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
    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=PrefixStore(f"zbpp/{_attempt(store, rank, size)}", store),
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    yield World(rank, size, chosen)
    # Not after an error: receives may be pending that nobody will match, and the error must get out.
    dist.destroy_process_group()


def _device(name: str) -> torch.device:
    """This process's device; "auto" is CUDA if every process of this machine gets one of its own."""
    # NCCL's first receive may run before the first kernel is loaded, and lazy loading would wait for it.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # A receive that waits holds up whatever shares its hardware queue: by default 8 for all streams.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device={name!r}: write cpu, cuda or auto")
    needed, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if name == "cuda" and found < needed:
        built = "" if torch.version.cuda else " and is built without CUDA"
        raise DeviceError(
            f"device=cuda: {needed} process(es) here, but torch sees {found} CUDA device(s){built}; "
            "write device=cpu"
        )
    if name == "cpu" or found < needed:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _attempt(store: Any, rank: int, size: int) -> str:
    """A name for this start of the job that all its ranks share and no earlier start had.

    After a restart on several nodes neither the agents' counts agree nor is the store empty. So each rank
    asks under a name of its own, and rank 0 answers until everybody has confirmed; questions of
    dead ranks stay unconfirmed until the new rank's replaces them.
    """
    if rank > 0:
        question = uuid4().hex
        store.set(f"zbpp/ask/{rank}", question)
        attempt = str(store.get(f"zbpp/answer/{question}").decode())
        store.set(f"zbpp/confirm/{attempt}/{rank}", "1")
        return attempt
    attempt = uuid4().hex
    waiting = list(range(1, size))
    while waiting:
        for each in waiting:
            question = store.get(f"zbpp/ask/{each}").decode()
            store.set(f"zbpp/answer/{question}", attempt)
        sleep(0.01)
        waiting = [each for each in waiting if not store.check([f"zbpp/confirm/{attempt}/{each}"])]
    return attempt


def link_groups(
    group: dist.ProcessGroup | None, links: Iterable[tuple[int, int]], timeout: float, device: torch.device
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A process group for each link (sender, receiver; ranks of `group`) that this rank is on. Collective.

    One each, since on NCCL whatever shares a communicator is done in one order, and a receive that
    is posted ahead would hold up a send. `links` in the same order on every rank.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    prefix = broadcast(unheard_name(), group)
    # Where the whole job is here, all join in: a communicator may be split off the job's, by all its ranks.
    make = _group_by_all if len(ranks) == dist.get_world_size() else _group_by_its_ranks
    groups = {}
    for link in links:
        ends = [ranks[each] for each in link]
        made = make(sorted(ends), f"{prefix}/{link[0]}_to_{link[1]}", timedelta(seconds=timeout))
        if made is not None:
            groups[link] = made
            _connect(made, *ends, device=device)
    return groups


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Leave groups that this module made, so that ranks that wait for this one stop at once.

    They do on gloo, once no pending send or receive is referred to; only then the sockets close, too.
    NCCL tells nobody: there they stop at the timeout, or when this process ends. What is under way is
    lost on both, so whoever closes in good order meets the other ranks first.
    """
    for group in groups if dist.is_initialized() else ():
        group.abort()
        dist.destroy_process_group(group)


def store_of_the_job(name: str) -> Store:
    """The job's store, under names of its own."""
    _, store = c10d._world.pg_map[c10d._get_default_group()]
    return PrefixStore(name, store)


def alone() -> dist.ProcessGroup | None:
    """A group of this process by itself, for a pipeline of one rank in a larger job; elsewhere None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return _group_by_its_ranks([dist.get_rank()], f"{unheard_name()}/alone", timedelta(minutes=10))


def unheard_name() -> str:
    """The beginning of a name that no group of the job ever had."""
    return f"zbpp/{uuid4().hex}"


def _group_by_all(ranks: list[int], name: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """A process group of these ranks, None on the others; called by every rank of the job."""
    made = dist.new_group(ranks, timeout=timeout, group_desc=name)
    return made if dist.get_rank() in ranks else None


def _group_by_its_ranks(ranks: list[int], name: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The same, but of the job's ranks only these need to call it.

    As `dist.new_group(use_local_synchronization=True)`, but under a name of ours: torch's own counts the
    groups that are open. Once some were closed it comes again, and with it, from the store, the
    addresses of the group that had it before.
    """
    if dist.get_rank() not in ranks:
        return None
    places = {rank: place for place, rank in enumerate(ranks)}
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        places[dist.get_rank()],
        ranks,
        backend,
        store,
        name,  # type: ignore[arg-type]  # a NewType of str, which not every torch has
        timeout=timeout,
        group_desc=name,
    )
    c10d._world.pg_group_ranks[made] = places
    return made


def _connect(group: dist.ProcessGroup, sender: int, receiver: int, *, device: torch.device) -> None:
    """One element across a link: NCCL makes a link's communicator at first use, and waits for both ends."""
    element = torch.zeros(1, device=device)
    if dist.get_rank() == sender:
        dist.send(element, dst=receiver, group=group)
    else:
        dist.recv(element, src=sender, group=group)


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
    """Turn torch's RuntimeError of a broken connection or a timeout into one that says where it was."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
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
