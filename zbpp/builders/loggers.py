"""The loggers of a run from the config: where its metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbpp.config import LoggerConfig
from zbpp.training.loggers import JsonLines, Logger, TensorBoard, Wandb


def build_loggers(
    options: LoggerConfig, folder: Path, settings: Mapping[str, Any], first_step: int = 0
) -> list[Logger]:
    """metrics.jsonl in the run's folder; wandb and TensorBoard if the config asks for them.

    settings: the run's config as values by dotted key, which both show. first_step: how many steps
    were done before.
    """
    loggers: list[Logger] = [JsonLines(folder / "metrics.jsonl")]
    if options.wandb:
        account: Any = {"project": options.project, "mode": options.mode}
        loggers.append(Wandb(folder, **account, config=settings, goes_on=first_step > 0))
    if options.tensorboard:
        loggers.append(TensorBoard(folder, config=settings, first_step=first_step))
    return loggers
