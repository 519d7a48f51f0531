"""The last rank stops in its second step: is it named within the timeout?"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from cluster_check.rows import Check, Timeouts
from zbpp.job.world import World
from zbpp.planning import plan
from zbpp.render import render_hang
from zbpp.runtime import FlightRecorder, Pipeline

SPARE = 15.0  # s beyond the timeout in which a stopped rank has to be named


def run(check: Check) -> None:
    """Nothing can be exchanged after it: ranks end by themselves, without an error for torchrun."""
    here = check.here
    if here.size == 1:
        check.write("hang: needs two ranks")
        return
    check.row("a rank stops", lambda: hang(check.timeouts, here, check.out / "hang"), is_alone=True)
    os._exit(int(check.num_failed > 0) if here.rank == 0 else 0)


class _Stops(nn.Linear):
    """A linear layer whose forward stops until a time on the clock, and then ends the process."""

    until = 0.0

    def forward(self, x: Tensor) -> Tensor:
        while self.until:
            time.sleep(0.5)
            if time.time() > self.until:
                os._exit(0)
        return super().forward(x)


def hang(timeouts: Timeouts, here: World, folder: Path) -> str:
    """Let the last rank stop in its second step; then the first one reads who is to blame.

    No collective can follow. On NCCL torch may end the processes first: `zbpp hang FOLDER` reads the records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stage, victim = _Stops(8, 8).to(here.device), here.size - 1
    timetable = plan("zb_h1", here.size, 2 * here.size)
    recorder = FlightRecorder(folder)
    pipeline = Pipeline(
        {here.rank: stage}, timetable, nn.functional.mse_loss, timeout=timeouts.hanging, extras=[recorder]
    )
    batch = torch.randn(2 * here.size, 8, device=here.device)
    begin = time.time()
    try:
        for step in range(2):
            begin = time.time()
            stage.until = begin + timeouts.hanging + SPARE if step == 1 and here.rank == victim else 0.0
            losses = pipeline.step(batch, target=batch)
            assert all(each.isfinite() for each in losses)  # waits for the device
    except Exception:  # what is raised differs; the records say who is to blame
        time.sleep(min(5.0, SPARE))  # the others leave their records
    records = [json.loads(path.read_text()) for path in folder.glob("flight-*.json")]
    said = (
        render_hang({each["process"]: each for each in records}).partition("\n")[0]
        if records
        else "no record"
    )
    if f"rank {victim} is behind" not in said:
        raise RuntimeError(f"rank {victim} stopped, and nothing names it: {said}")
    after = min(float(each["written"]) for each in records) - begin
    if after > timeouts.hanging + SPARE:
        raise RuntimeError(f"rank {victim} was named only after {after:.1f} s")
    return f"rank {victim} stopped and was named after {after:.1f} s (timeout {timeouts.hanging:g} s)"
