"""Process groups: one for each link between two ranks.

Made when a pipeline is made, closed with it. Names in the job's store are never used twice, since a closed
group leaves its addresses there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._C._distributed_c10d import Store as Store  # re-exported: same_calls.py names the type
from torch.distributed import distributed_c10d as c10d

from zbpp.devices import backend_of, occupies_device, urgent_options
from zbpp.job.agreement import broadcast
from zbpp.runtime.host_links import HostLink, needs_host_link

if TYPE_CHECKING:
    from zbpp.runtime.processes.mesh import MeshPosition


def link_groups(
    group: dist.ProcessGroup | None,
    links: Iterable[tuple[int, int]],
    timeout: float,
    device: torch.device,
    backend: str = "",
) -> dict[tuple[int, int], dist.ProcessGroup | HostLink]:
    """A process group for each link that this rank is an end of: {(sender, receiver): its group}. Collective.

    device: where messages are. On gloo a group whose messages are on a GPU is wrapped in a HostLink.
    backend: of the links; "": the one that carries the messages of `group`.

    links: (sender, receiver), as ranks of `group`, the same on every rank. They are connected in rounds: in
    each round a rank waits for one other rank at most, so neighbours need two rounds, whatever their number.
    Each link has a group of its own, since NCCL runs everything that shares a communicator in one order: a
    receive that has started would hold up a send.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    prefix = broadcast(unique_name(), group)
    backend = backend or backend_of(group, device)
    groups: dict[tuple[int, int], dist.ProcessGroup | HostLink] = {}
    for link in in_rounds(links):
        sender, receiver = (ranks[end] for end in link)
        name = f"{prefix}/{link[0]}_to_{link[1]}"
        limit = timedelta(seconds=timeout)
        options = urgent_options(backend, limit)
        made = new_group(sorted([sender, receiver]), name, limit, options, backend)
        if made is not None:
            is_staged = needs_host_link(made, device)
            groups[link] = HostLink(made, device) if is_staged else made
            _connect(made, sender, receiver, device=torch.device("cpu") if is_staged else device)
    return groups


def in_rounds(links: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The links, in an order in which pairs of ranks that have no rank in common come together.

    The pairs 0-1, 2-3, 4-5 come first, then 1-2, 3-4: each pair in the first round that both ranks are free.
    """
    rounds: dict[tuple[int, ...], int] = {}
    links = sorted(links, key=sorted)
    for pair in (tuple(sorted(link)) for link in links):
        taken = {number for other, number in rounds.items() if other != pair and {*other} & {*pair}}
        rounds.setdefault(pair, next(each for each in count() if each not in taken))
    return sorted(links, key=lambda link: rounds[tuple(sorted(link))])


def runs_on_device(link: dist.ProcessGroup | HostLink, device: torch.device) -> bool:
    """Whether a receive that has started occupies the device until its message is there."""
    return not isinstance(link, HostLink) and occupies_device(backend_of(link, device))


def close_groups(groups: Iterable[dist.ProcessGroup | HostLink]) -> None:
    """Leave groups that this module made. Messages under way are lost: wait for all ranks before.

    On gloo, ranks that wait for this one stop at once, provided that nothing refers to a pending send or
    receive any more: only then do the sockets close. On NCCL they can't see it, and torch's watchdog ends
    their processes at the timeout.
    """
    if not dist.is_initialized():
        return
    for each in groups:
        group = each.close() if isinstance(each, HostLink) else each
        group.abort()
        dist.destroy_process_group(group)


def new_group(
    ranks: list[int], name: str, timeout: timedelta, options: Any = None, backend: str | None = None
) -> dist.ProcessGroup | None:
    """A process group of these ranks, None on the others; only these ranks need to call it.

    This is `dist.new_group(use_local_synchronization=True)` with a unique name. torch's name is the number of
    open groups: after some were closed a name comes again, and a new group would find the addresses of the
    earlier one in the store.

    If the job's own group is bound to a device (`init_process_group(device_id=...)`), torch would split the
    communicator off the job's own, which all ranks of the job have to do together, and some are not here. So
    the group is made as if nothing were bound.
    """
    if dist.get_rank() not in ranks:
        return None
    places = {rank: place for place, rank in enumerate(ranks)}
    own_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    made: dist.ProcessGroup
    with _without_bound_device():
        made, _ = c10d._new_process_group_helper(
            len(ranks),
            places[dist.get_rank()],
            ranks,
            backend or own_backend,
            store,
            name,  # type: ignore[arg-type]  # a NewType of str, which not every torch has
            backend_options=options,
            timeout=timeout,
            group_desc=name,
        )
    c10d._world.pg_group_ranks[made] = places
    return made


def gloo_group(place: MeshPosition, timeout: float) -> dist.ProcessGroup | None:
    """A new group of all processes of a mesh, in their order, on gloo; None for one process. Collective.

    In it threads may talk while training steps use the other groups.
    """
    mine = dist.get_rank() if dist.is_initialized() else 0
    gathered = place.gather((mine, unique_name()))
    if len(gathered) == 1:
        return None
    limit = timedelta(seconds=timeout)
    return new_group([rank for rank, _ in gathered], gathered[0][1], limit, backend="gloo")


def job_store(prefix: str) -> Store:
    """The job's store, where every key gets `prefix` in front."""
    _, store = c10d._world.pg_map[c10d._get_default_group()]
    return PrefixStore(prefix, store)


def group_of_this_process() -> dist.ProcessGroup | None:
    """A group of this process only, for a pipeline of one rank in a larger job; None in a job of one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return new_group([dist.get_rank()], f"{unique_name()}/alone", timedelta(minutes=10))


def group_of(
    ranks: Sequence[int], group: dist.ProcessGroup | None, name: str, timeout: float
) -> dist.ProcessGroup | None:
    """A new group of some ranks of `group`, None on the others; only these ranks need to call it.

    name: unique in the job.
    """
    everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
    return new_group([everyone[rank] for rank in ranks], name, timedelta(seconds=timeout))


def group_like(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """A new group of the same ranks. Collective over the group."""
    name = broadcast(unique_name(), group)
    made = group_of(range(dist.get_world_size(group)), group, name, timeout)
    assert made is not None  # this process is in the group
    return made


def set_timeout(group: dist.ProcessGroup, timeout: float) -> None:
    """Let a wait in the group last so many seconds at most: DeviceMesh gives its groups half an hour."""
    # Its public name is there from torch 2.15 on.
    set_timeout: Any = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout), group)


def unique_name() -> str:
    """The beginning of a name that nothing else in the job ever had."""
    return f"zbpp/{uuid4().hex}"


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Let the job's own group be bound to no device for a while."""
    job = c10d._get_default_group()
    bound = job.bound_device_id
    job.bound_device_id = None
    try:
        yield
    finally:
        job.bound_device_id = bound


def _connect(group: dist.ProcessGroup, sender: int, receiver: int, *, device: torch.device) -> None:
    """Send one element: NCCL makes a link's communicator at first use, and waits there for both ends."""
    element = torch.zeros(1, device=device)
    if dist.get_rank() == sender:
        dist.send(element, dst=receiver, group=group)
    else:
        dist.recv(element, src=sender, group=group)
