"""Which ranks did not come to a call that all ranks of a group make: asked when the call has failed.

A rank that waits in vain fails, at the timeout or as soon as another rank's failure closes a connection. So
all ranks that wait in the call fail within a moment. Each says so in the job's store. A rank that says
nothing has not come. Nothing is said as long as nothing fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_WAIT, _POLL = 1.0, 0.05  # s
_PATIENCE = 3.0  # s, since a store whose process is stopped does not answer


def missing_in(group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of the group that have not failed in it, as this one has; [] if nothing can be found out."""
    found: list[int] = []
    thread = threading.Thread(target=_ask, args=(group, found), daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return [] if thread.is_alive() else found


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2` or `ranks 2, 5`."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _ask(group: dist.ProcessGroup | None, found: list[int]) -> None:
    try:
        _, store = c10d._world.pg_map[c10d._get_default_group()]
        store = store.clone() if hasattr(store, "clone") else store
        store.set_timeout(timedelta(seconds=_PATIENCE))
        found += _silent(store, group or dist.group.WORLD)
    except (RuntimeError, ValueError):
        return  # the store is gone, or the group


def _silent(store: Any, group: Any) -> list[int]:
    prefix = f"zbpp/gave_up/{group.group_name}"
    store.set(f"{prefix}/{dist.get_rank(group)}", "1")
    silent, end = list(range(dist.get_world_size(group))), monotonic() + _WAIT
    while silent and monotonic() < end:
        sleep(_POLL)
        silent = [rank for rank in silent if not store.check([f"{prefix}/{rank}"])]
    return silent
