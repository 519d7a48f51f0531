"""Where a run is logged: `metrics.jsonl` is the record; wandb and TensorBoard show a copy.

Both also show the pictures and texts that are files of the run folder.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from zbpp.training.folder.run_files import FolderError, Record
from zbpp.training.non_finite import text_of

Metrics = Mapping[str, Any]


class Logger(Protocol):
    """Takes one dict per step, and pictures and texts by name; `close` ends the run."""

    def log(self, metrics: Metrics) -> None: ...
    def picture(self, name: str, path: Path, step: int) -> None: ...
    def text(self, name: str, text: str, step: int) -> None: ...
    def close(self, summary: Metrics, *, failed: bool) -> None: ...


class JsonLines:
    """One JSON object per line, written at once, so that a run can be watched and survives a crash."""

    def __init__(self, path: Path) -> None:
        self._record = Record(path)  # a run that goes on has lines already

    def log(self, metrics: Metrics) -> None:
        self._record.add(json.dumps(finite(metrics), allow_nan=False))

    @property
    def missing_steps(self) -> list[int]:
        """The steps that the file lacks, since the disk is full."""
        return [json.loads(line)["step"] for line in self._record.missing]

    def picture(self, name: str, path: Path, step: int) -> None:
        """Pictures are files beside this one."""

    def text(self, name: str, text: str, step: int) -> None:
        """Texts are files beside this one."""

    def close(self, summary: Metrics, *, failed: bool) -> None:
        with suppress(*[FolderError] * failed):  # if the run has failed, its own error is the one to show
            self._record.close()


class Wandb:
    """One wandb run for the whole job, written by the rank that makes this object.

    mode="online" without an account falls back to offline, with a line that says so. goes_on: continue the
    wandb run of an earlier start of the job; its id is in the folder's `wandb/id`.
    """

    def __init__(
        self, folder: Path, *, project: str, mode: str, config: Metrics, goes_on: bool = False
    ) -> None:
        import wandb  # lazily: 0.4 s, and optional

        settings = wandb.Settings(console="off", silent=True)

        kept = folder / "wandb" / "id"
        earlier = kept.read_text().strip() if goes_on and kept.is_file() else None

        def start(mode: Any) -> Any:
            # wandb resumes online runs only. Syncing joins the offline parts, which have the same id.
            again: Any = "allow" if earlier and mode == "online" else None
            options: Any = {"id": earlier, "resume": again, "config": dict(config), "settings": settings}
            return wandb.init(mode=mode, project=project, dir=str(folder), **options)

        try:
            self._run = start(_usable(mode))
        except wandb.errors.Error as error:
            print(f"wandb: {error}; logging offline, `wandb sync` later", flush=True)
            self._run = start("offline")
        if mode != "disabled":
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(f"{self._run.id}\n")

    def log(self, metrics: Metrics) -> None:
        self._run.log(_numbers(metrics), step=int(metrics["step"]))

    def picture(self, name: str, path: Path, step: int) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))}, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def close(self, summary: Metrics, *, failed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


class TensorBoard:
    """One event file for each start of a run, in the folder `tensorboard` of the run's.

    first_step: how many steps were done before; TensorBoard hides what an earlier start logged after them.
    """

    def __init__(self, folder: Path, *, config: Metrics, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # lazily: a second, and optional

        purge_step = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("config", _as_table(config))

    def log(self, metrics: Metrics) -> None:
        for key, value in _numbers(metrics).items():
            self._writer.add_scalar(key, value, int(metrics["step"]))
        self._writer.flush()

    def picture(self, name: str, path: Path, step: int) -> None:
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        # Four spaces: Markdown shows the text as it is.
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

    def close(self, summary: Metrics, *, failed: bool) -> None:
        if summary:
            self._writer.add_text("summary", _as_table(summary))
        self._writer.close()


def _numbers(metrics: Metrics) -> dict[str, int | float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _as_table(values: Metrics) -> str:
    rows = "".join(f"| {key} | {value} |\n" for key, value in values.items())
    return f"| key | value |\n|---|---|\n{rows}"


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
    """Several loggers as one, closed in every case.

    A logger that raises an OSError, as on a full disk, gets nothing more: the run goes on without it.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers, self._failed = loggers, set[int]()
        self.summary: dict[str, Any] = {}

    def log(self, metrics: Metrics) -> None:
        self._each(lambda logger: logger.log(metrics))

    def picture(self, name: str, path: Path, step: int) -> None:
        self._each(lambda logger: logger.picture(name, path, step))

    def text(self, name: str, text: str, step: int) -> None:
        self._each(lambda logger: logger.text(name, text, step))

    @property
    def missing_steps(self) -> list[int]:
        """The steps that metrics.jsonl lacks."""
        return [step for each in self._loggers if isinstance(each, JsonLines) for step in each.missing_steps]

    def _each(self, do: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            if id(logger) in self._failed:
                continue
            try:
                do(logger)
            except OSError as error:
                self._failed.add(id(logger))
                print(f"{type(logger).__name__} gets nothing more: {error}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # each is closed, whatever happens to the others
            for logger in self._loggers:
                stack.callback(logger.close, self.summary, failed=error is not None)


def finite(metrics: Metrics) -> dict[str, Any]:
    """JSON has no NaN and no infinity: "NaN", "Infinity" and "-Infinity" stand for them.

    float() reads these texts, and so does JavaScript's Number().
    """
    return {
        key: text_of(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metrics.items()
    }
