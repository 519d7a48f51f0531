"""What waits for a receive that NCCL has been given ahead, and whose sender has not answered yet?

Rank 1 posts a receive, calls something, and sees whether the receive had ended when the call returned. Rank 0
sends a while later, whatever rank 1 does, so that nothing hangs. The calls are those of gpu_check's part, in
which a sleeping kernel stands for the receive. Rank 0 writes each row before the call and after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from gpu_check.page import Here, Page, first_line
from gpu_check.waits import SLEEP, Waits

from cluster_check.rows import Check
from zbpp.runtime.processes.groups import job_store, link_groups

_LIMIT = timedelta(minutes=2)


def run(check: Check) -> None:
    here = check.here
    if here.size == 1:
        check.write("waits: needs two ranks")
        return
    links = link_groups(None, [(0, 1)], check.timeouts.waiting, here.device)
    store = job_store("cluster_check_waits")
    if here.rank == 0:
        check.num_failed += _answer(links[0, 1], store, here.device)
    elif here.rank == 1:
        waits = _Behind(Page(Here(here.device, check.is_small)), links[0, 1], store)
        waits.all()
        waits.end()


def _answer(link: Any, store: Any, device: torch.device) -> int:
    """Rank 0: send as often, and after as many seconds, as rank 1 says; how many calls raised."""
    print("\n| behind a posted receive | predicted | measured |\n|---|---|---|")
    num_failed = 0
    for number in count():
        what, predicted, sleep = _told(store, f"posted/{number}")
        if not what:
            return num_failed
        print(f"| {what} | {predicted or 'unknown'} | ", end="", flush=True)
        time.sleep(sleep)
        link.send([torch.ones(1, device=device)], 1, number + 1).wait()
        problem, found = _told(store, f"found/{number}")
        num_failed += bool(problem)
        print(f"{problem}{found} |", flush=True)


def _told(store: Any, key: str) -> Any:
    store.wait([key], _LIMIT)
    return json.loads(store.get(key))


class _Behind(Waits):
    """Rank 1: the calls, each behind a posted receive."""

    def __init__(self, page: Page, link: Any, store: Any) -> None:
        super().__init__(page)
        self._link, self._store, self._numbers = link, store, count()

    def ask(self, what: str, predicted: str, call: Callable[[], Any], sleep: float = SLEEP) -> None:
        number, received = next(self._numbers), torch.zeros(1, device=self.here.device)
        work = self._link.recv([received], 0, number + 1)
        self._tell(f"posted/{number}", what, predicted, sleep if self.here.is_cuda else 0.02)
        begin, problem = time.perf_counter(), ""
        try:
            call()
        except Exception as error:  # whatever it is belongs into the row
            problem = f"FAILED: {first_line(error)}: "
        took, is_over = time.perf_counter() - begin, work.is_completed()
        work.wait()
        self.here.synchronize()
        verdict = "waits (or took longer)" if is_over else "does not wait"
        self._tell(f"found/{number}", problem, f"{verdict}: {took:.3f} s")

    def end(self) -> None:
        self._tell(f"posted/{next(self._numbers)}", "", "", 0.0)

    def _tell(self, key: str, *values: Any) -> None:
        self._store.set(key, json.dumps(values))
