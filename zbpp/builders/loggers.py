"""The loggers of a run from the config: where its metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbpp.config import LoggerConfig
from zbpp.training.loggers import JsonLines, Logger, Wandb


def build_loggers(options: LoggerConfig, folder: Path, settings: Mapping[str, Any]) -> list[Logger]:
    """metrics.jsonl in the run's folder, and wandb if the config asks for it.

    settings: the run's config as values by dotted key, which wandb shows.
    """
    loggers: list[Logger] = [JsonLines(folder / "metrics.jsonl")]
    if options.name == "wandb":
        loggers.append(Wandb(folder, project=options.project, mode=options.mode, config=settings))
    return loggers
