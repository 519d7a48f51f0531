"""The last rank stops in its second step: is it named within the timeout?"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cluster_check.rows import Check, Timeouts
from zbpp.job.world import World
from zbpp.observers.flight_recorder import FlightRecorder
from zbpp.planning import plan
from zbpp.render import render_hang
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.groups import job_store

SPARE = 15.0  # s beyond the timeout in which a stopped rank has to be named
_POLL = 0.1  # s


def run(check: Check) -> None:
    """Nothing can be exchanged after it: ranks end by themselves, without an error for the driver.

    On NCCL torch's watchdog ends processes at the timeout, so a thread waits for the records, which are
    written before.
    """
    here, folder = check.here, check.out / "hang"
    if here.size == 1:
        check.write("hang: needs two ranks")
        return
    begun, store = threading.Event(), job_store("cluster_check_hang")
    threading.Thread(target=_judge, args=(check, folder, begun, store), daemon=True).start()
    _stop_in_a_step(check.timeouts, here, folder, begun.set)
    time.sleep(check.timeouts.hanging + 2 * SPARE)  # the judge ends this process


def _judge(check: Check, folder: Path, begun: threading.Event, store: Any) -> None:
    """Rank 0 writes the row, and the other ranks wait for that; then the process ends."""
    here, hanging = check.here, check.timeouts.hanging
    begun.wait()
    begin = time.time()
    predicted = f"{0.5 * hanging:g} to {hanging + 1:g} s"
    if here.rank == 0:
        check.row("a rank stops", lambda: named(folder, here, hanging, begin), predicted, is_alone=True)
        store.set("judged", "")
    else:
        _awaited(lambda: store.check(["judged"]), hanging + SPARE)
    os._exit(int(check.num_failed > 0))


def named(folder: Path, here: World, hanging: float, begin: float) -> str:
    """Wait until the ranks' records name the last rank. Raises RuntimeError if they don't in time."""
    victim, said = here.size - 1, "no record"

    def is_named() -> bool:
        nonlocal said
        said = _said(folder)
        return f"rank {victim} is behind" in said

    _awaited(is_named, hanging + SPARE)
    after = time.time() - begin
    if not is_named():
        raise RuntimeError(f"rank {victim} stopped, and nothing names it within {after:.0f} s: {said}")
    return f"rank {victim} stopped and was named after {after:.1f} s (timeout {hanging:g} s)"


def _said(folder: Path) -> str:
    """What `zbpp hang FOLDER` says first."""
    try:
        records = [json.loads(path.read_text()) for path in folder.glob("flight-*.json")]
    except ValueError:  # one is being written
        return "a record is being written"
    return render_hang({each["process"]: each for each in records}).partition("\n")[0] if records else ""


def _awaited(is_there: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_there() and time.monotonic() < end:
        time.sleep(_POLL)


class _Stops(nn.Linear):
    """A linear layer whose forward stops for good, if it is told to."""

    stops = False

    def forward(self, x: Tensor) -> Tensor:
        while self.stops:
            time.sleep(_POLL)
        return super().forward(x)


def _stop_in_a_step(timeouts: Timeouts, here: World, folder: Path, begin: Callable[[], None]) -> None:
    """Run two steps, in the second of which the last rank stops."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("flight-*.json"):
        old.unlink(missing_ok=True)
    stage = _Stops(8, 8).to(here.device)
    timetable = plan("zb_h1", here.size, 2 * here.size)
    pipeline = Pipeline(
        {here.rank: stage},
        timetable,
        nn.functional.mse_loss,
        timeout=timeouts.hanging,
        extras=[FlightRecorder(folder)],
    )
    batch = torch.randn(2 * here.size, 8, device=here.device)
    pipeline.step(batch, target=batch)
    stage.stops = here.rank == here.size - 1
    begin()
    try:
        losses = pipeline.step(batch, target=batch)
        assert all(each.isfinite() for each in losses)  # waits for the device
    except Exception as error:  # what is raised differs; the records say who is to blame
        print(f"rank {here.rank}: {type(error).__name__}", file=sys.stderr, flush=True)
