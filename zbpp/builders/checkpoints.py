"""The callbacks that save a run and leave it, from the config; and going on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbpp.config import TrainConfig
from zbpp.job.agreement import broadcast
from zbpp.training.callbacks import Callback
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.leaving import StopAfter
from zbpp.training.run_folder import CHECKPOINTS, RunFolder
from zbpp.training.trainer import Trainer


def build_saving(
    config: TrainConfig,
    settings: Mapping[str, Any],
    path: Path,
    trainer: Trainer,
    folder: RunFolder | None,
) -> list[Callback]:
    """Callbacks that save and leave the run. If `folder` names a checkpoint, the trainer goes on from it.

    settings: the config by dotted key. folder: on rank 0, None elsewhere. path: that folder's path, on every
    rank. Collective.
    """
    options = config.checkpoint
    checkpoints = Checkpoints(
        path / CHECKPOINTS,
        every=options.every,
        keep=options.keep,
        background=options.background,
        config={key: value for key, value in settings.items() if key != "run_dir"},
    )
    source, has_ended = broadcast(None if folder is None else (_below(folder), folder.has_ended))
    if source is not None:
        checkpoints.resume(trainer, path / source, config.steps, has_ended=has_ended)
    return [checkpoints, *([] if config.stop_after is None else [StopAfter(config.stop_after)])]


def _below(folder: RunFolder) -> Path | None:
    """The source, relative to the run's folder if it lies there: on other nodes its path may differ."""
    if folder.source is not None and folder.source.is_relative_to(folder.path):
        return folder.source.relative_to(folder.path)
    return folder.source
