"""Where metrics go: `metrics.jsonl` is the record; wandb shows a copy."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

Metrics = Mapping[str, Any]


class Logger(Protocol):
    """Takes one dict per step; `close` ends the run."""

    def log(self, metrics: Metrics) -> None: ...
    def close(self, summary: Metrics, *, failed: bool) -> None: ...


class JsonLines:
    """One JSON object per line, flushed, so that a run can be watched and survives a crash."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")  # a run that goes on has lines already

    def log(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(finite(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self, summary: Metrics, *, failed: bool) -> None:
        self._file.close()


class Wandb:
    """One wandb run for the whole job, written by the rank that makes this object.

    mode="online" without an account falls back to offline, with a line that says so.
    """

    def __init__(self, folder: Path, *, project: str, mode: str, config: Metrics) -> None:
        import wandb  # lazily: 0.4 s, and optional

        settings = wandb.Settings(console="off", silent=True)

        def start(mode: Any) -> Any:
            return wandb.init(
                mode=mode, project=project, dir=str(folder), config=dict(config), settings=settings
            )

        try:
            self._run = start(_usable(mode))
        except wandb.errors.Error as error:
            print(f"wandb: {error}; logging offline, `wandb sync` later", flush=True)
            self._run = start("offline")

    def log(self, metrics: Metrics) -> None:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=int(metrics["step"]))

    def close(self, summary: Metrics, *, failed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


def _usable(mode: str) -> Any:
    has_key = "WANDB_API_KEY" in os.environ or _in_netrc()
    if mode == "online" and not has_key:
        print("wandb: no API key here; logging offline, `wandb sync` later", flush=True)
        return "offline"
    return mode


def _in_netrc() -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


class Loggers:
    """Several loggers as one, closed in every case."""

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers = loggers
        self.summary: dict[str, Any] = {}

    def log(self, metrics: Metrics) -> None:
        for logger in self._loggers:
            logger.log(metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # each is closed, whatever happens to the others
            for logger in self._loggers:
                stack.callback(logger.close, self.summary, failed=error is not None)


def finite(metrics: Metrics) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null stands for them."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metrics.items()
    }
