"""A rank stops inside a step: do the records that the ranks leave name it within the timeout?

Every rank that notices also writes the error that it got, and when. The job ends with an error, as a real one
would; so the verdict is found afterwards, see hang_verdict.py.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from zbpp.benchmark.cluster.hang_verdict import BEGIN
from zbpp.benchmark.cluster.rows import NOT_RUN, Journal, Row
from zbpp.benchmark.cluster.settings import Settings
from zbpp.job.world import World
from zbpp.planning import plan
from zbpp.runtime import FlightRecorder, Pipeline

_WIDTH = 8


class _Stops(nn.Linear):
    """A linear layer whose forward stops for good, once `stops` is set."""

    stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while self.stops:
            time.sleep(1.0)
        return super().forward(x)


def run(settings: Settings, here: World) -> None:
    """Let the last rank stop in its second step. Ends the process, unless there is one rank. Collective."""
    folder = settings.out / "hang"
    journal = Journal(settings.out, "hang")
    if here.size == 1:
        journal.end(Row("hang", "a rank stops", NOT_RUN, "one rank waits for nobody", {}))
        return
    folder.mkdir(parents=True, exist_ok=True)
    num_microbatches = 2 * here.size
    stage = _Stops(_WIDTH, _WIDTH).to(here.device)
    timetable = plan("zb_h1", here.size, num_microbatches)
    pipeline = Pipeline(
        {here.rank: stage},
        timetable,
        nn.functional.mse_loss,
        timeout=settings.hang_timeout,
        extras=[FlightRecorder(folder, ends_process=True)],
    )
    batch = torch.randn(num_microbatches, _WIDTH, device=here.device)
    victim, begin = here.size - 1, time.time()
    try:
        for step in range(2):
            if step == 1:
                stage.stops, begin = here.rank == victim, time.time()
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    facts = {"victim": victim, "begin": begin, "timeout": settings.hang_timeout}
                    (folder / BEGIN).write_text(json.dumps(facts))
            for loss in pipeline.step(batch, target=batch):
                loss.item()
            if here.device.type == "cuda":
                torch.cuda.synchronize(here.device)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        _leave(folder, here.rank, begin, f"{type(error).__name__}: {error} {notes}")
    _leave(folder, here.rank, begin, "the step ended: nothing stopped")


def _leave(folder: Path, rank: int, begin: float, said: str) -> NoReturn:
    answer = {"rank": rank, "after": time.time() - begin, "said": said}
    (folder / f"said-{rank}.json").write_text(json.dumps(answer))
    os._exit(3)  # links are broken: an orderly end would wait for them
