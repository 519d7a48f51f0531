"""torch.profiler over some steps, with the actions of the timetable by their names: `2F5`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zbpp.runtime import Pipeline
from zbpp.runtime.measure import ProfilerNames
from zbpp.training.callbacks import Callback
from zbpp.training.optim.update import Metrics

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer


class Profile(Callback):
    """Profiles this rank in `steps`, counted from 1, and writes `path` after the last of them.

    The file is a Chrome trace, for ui.perfetto.dev. A run that ends earlier writes what there is. Before and
    after these steps the pipeline runs as without this callback.
    """

    def __init__(self, steps: range, path: Path, *, say: Callable[[str], None] = lambda text: None) -> None:
        self._steps, self._path, self._say = steps, path, say
        self._profiler: torch.profiler.profile | None = None
        self._named: Pipeline | None = None
        self._names = ExitStack()

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Begin with the first step of the range."""
        if step + 1 not in self._steps:
            return
        if self._named is not trainer.pipeline:  # replanning may have replaced it
            self._named = trainer.pipeline
            self._names.close()
            self._names.enter_context(self._named.using(ProfilerNames()))
        if self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if trainer.pipeline.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """End after the last step of the range."""
        if step + 1 >= self._steps[-1]:
            self._end()

    def finish(self, trainer: Trainer) -> None:
        """End, if the run ends inside the range."""
        self._end()

    def _end(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._say(f"profile of steps {self._steps[0]} to {self._steps[-1]} written to {self._path}")
        self._names.close()
        self._profiler, self._named = None, None
