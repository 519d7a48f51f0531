"""The callbacks and loggers of a run, from its config: figures, profile, saving, metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbpp.config import ConfigError, LoggerConfig, TrainConfig, instantiate_node
from zbpp.error_text import kind_of
from zbpp.job.agreement import broadcast
from zbpp.job.world import World
from zbpp.training.callbacks import Callback, Profile
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.leaving import StopAfter
from zbpp.training.loggers import JsonLines, Logger, TensorBoard, Wandb
from zbpp.training.measured_steps import LiveFigures
from zbpp.training.optim.precision import PRECISIONS
from zbpp.training.run_folder import CHECKPOINTS, RunFolder
from zbpp.training.trainer import Trainer


def build_callbacks(config: TrainConfig, here: World, folder: Path) -> list[Callback]:
    """This rank's callbacks beside the user's: figures, a profile."""
    callbacks: list[Callback] = [LiveFigures(here, PRECISIONS[config.precision].compute)]
    if config.profile is not None:
        callbacks.append(Profile(config.profiled_steps, folder / "profile" / f"rank-{here.rank}.json"))
    return callbacks


def build_own_callbacks(config: TrainConfig) -> list[Callback]:
    """The user's callbacks, which the config names by `_target_`. Raises ConfigError.

    The trainer is made with them, since a checkpoint holds the states of those that have one.
    """
    return [_own_callback(f"callbacks[{number}]", node) for number, node in enumerate(config.callbacks)]


def _own_callback(part: str, node: Any) -> Callback:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{part}={node}: write a class of yours as {{_target_: my_file.MyCallback}}")
    made = instantiate_node(part, node)
    if not isinstance(made, Callback):
        raise ConfigError(
            f"{part} ({node['_target_']}): the call returns {kind_of(made)}, not a "
            "zbpp.training.callbacks.Callback: derive the class from it"
        )
    return made


# ----------------------------------------------------------------
# The callbacks that save a run and leave it, from the config; and going on from a checkpoint.


def build_saving(
    config: TrainConfig,
    settings: Mapping[str, Any],
    path: Path,
    trainer: Trainer,
    folder: RunFolder | None,
) -> list[Callback]:
    """Callbacks that save and leave the run. If `folder` names a checkpoint, the trainer goes on from it.

    settings: the config by dotted key, without run_dir. folder: on rank 0, None elsewhere. path: that
    folder's path, on every rank. Collective.
    """
    options = config.checkpoint
    checkpoints = Checkpoints(
        path / CHECKPOINTS,
        every=options.every,
        keep=options.keep,
        background=options.background,
        config=settings,
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


# ----------------------------------------------------------------
# The loggers of a run from the config: where its metrics go.


def build_loggers(
    options: LoggerConfig, folder: Path, settings: Mapping[str, Any], first_step: int = 0
) -> list[Logger]:
    """metrics.jsonl in the run's folder; wandb and TensorBoard if the config asks for them.

    wandb's own variables, WANDB_PROJECT and WANDB_MODE, say where its run is.

    settings: the run's config as values by dotted key, which both show. first_step: how many steps
    were done before.
    """
    loggers: list[Logger] = [JsonLines(folder)]
    if options.wandb:
        project, mode = os.environ.get("WANDB_PROJECT", "zbpp"), os.environ.get("WANDB_MODE", "online")
        loggers.append(Wandb(folder, project=project, mode=mode, config=settings, goes_on=first_step > 0))
    if options.tensorboard:
        loggers.append(TensorBoard(folder, config=settings, first_step=first_step))
    return loggers
