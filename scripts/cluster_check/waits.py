"""What waits for a receive that NCCL has been given ahead, and whose sender has not answered yet?

Rank 1 posts a receive, calls something, and sees whether the receive had ended when the call returned. Rank 0
sends a while later, whatever rank 1 does, so that nothing hangs. The calls are those of gpu_check's part, in
which a sleeping kernel stands for the receive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from gpu_check.page import Here, Page
from gpu_check.waits import SLEEP, Waits

from cluster_check.rows import Check
from zbpp.runtime.groups import job_store, link_groups

_END = "end"


def run(check: Check) -> None:
    here = check.here
    if here.size == 1:
        check.write("waits: needs two ranks")
        return
    links = link_groups(None, [(0, 1)], check.timeouts.waiting, here.device)
    store = job_store("cluster_check_waits")
    if here.rank == 0:
        _answer(links[0, 1], store, here.device)
        print(store.get("page").decode(), flush=True)
        check.num_failed += int(store.get("failed"))
    elif here.rank == 1:
        page = Page(Here(here.device, check.is_small, 60.0))
        waits = _Behind(page, links[0, 1], store)
        waits.all()
        waits.end()


def _answer(link: Any, store: Any, device: torch.device) -> None:
    """Rank 0: send as often, and after as many seconds, as rank 1 says."""
    for number in count():
        store.wait([f"posted/{number}"], timedelta(minutes=2))
        told = store.get(f"posted/{number}").decode()
        if told == _END:
            return
        time.sleep(float(told))
        link.send([torch.ones(1, device=device)], 1, number + 1).wait()


class _Behind(Waits):
    """Rank 1: the calls, each behind a posted receive. Its rows go to rank 0, which writes the page."""

    def __init__(self, page: Page, link: Any, store: Any) -> None:
        super().__init__(page)
        self._link, self._store, self._numbers, self._rows = link, store, count(), list[str]()

    def ask(self, what: str, predicted: str, call: Callable[[], Any], sleep: float = SLEEP) -> None:
        number, received = next(self._numbers), torch.zeros(1, device=self.here.device)
        work = self._link.recv([received], 0, number + 1)
        self._store.set(f"posted/{number}", str(sleep if self.here.is_cuda else 0.05))
        begin, problem = time.perf_counter(), ""
        try:
            call()
        except Exception as error:  # whatever it is belongs into the row
            self.page.num_failed += 1
            problem = f"FAILED: {type(error).__name__}: {error} "
        took, is_over = time.perf_counter() - begin, work.is_completed()
        work.wait()
        self.here.synchronize()
        verdict = "waits (or took longer)" if is_over else "does not wait"
        self._rows.append(f"| {what} | {predicted or 'unknown'} | {problem}{verdict}: {took:.3f} s |")

    def end(self) -> None:
        self._store.set(
            "page",
            "\n".join(["\n| behind a posted receive | predicted | measured |\n|---|---|---|", *self._rows]),
        )
        self._store.set("failed", str(self.page.num_failed))
        self._store.set(f"posted/{next(self._numbers)}", _END)
