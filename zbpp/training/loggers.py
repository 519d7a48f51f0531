"""Where a run is logged: files in its folder are the record; wandb, TensorBoard and the terminal show it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from torch import Tensor

from zbpp.training.measured_steps import duration
from zbpp.training.non_finite import text_of

Metrics = Mapping[str, Any]


class Logger(Protocol):
    """Takes one dict per step, and pictures by name; `close` ends the run."""

    def log(self, metrics: Metrics) -> None: ...
    def picture(self, name: str, path: Path, step: int) -> None: ...
    def close(self, summary: Metrics, *, failed: bool) -> None: ...


class JsonLines:
    """metrics.jsonl in a folder. A line is written at once: a run can be watched."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._path.touch()  # a run that goes on has lines already

    def log(self, metrics: Metrics) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(finite(metrics), allow_nan=False) + "\n")

    def picture(self, name: str, path: Path, step: int) -> None:
        """Pictures are files beside this one."""

    def close(self, summary: Metrics, *, failed: bool) -> None:
        """Nothing is open."""


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
            self._run = start(mode)
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

    def close(self, summary: Metrics, *, failed: bool) -> None:
        if summary:
            self._writer.add_text("summary", _as_table(summary))
        self._writer.close()


def _numbers(metrics: Metrics) -> dict[str, int | float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _as_table(values: Metrics) -> str:
    rows = "".join(f"| {key} | {value} |\n" for key, value in values.items())
    return f"| key | value |\n|---|---|\n{rows}"


class Loggers:
    """Several loggers as one, closed in every case.

    A logger that raises an OSError, as on a full disk, gets nothing more: the run goes on without it.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers, self._failed = loggers, set[int]()
        self.summary: dict[str, Any] = {}

    def log(self, metrics: Metrics) -> None:
        """Log a step. A tensor with one element, which a callback may add, becomes a number."""
        plain = {key: each.item() if isinstance(each, Tensor) else each for key, each in metrics.items()}
        self._each(lambda logger: logger.log(plain))

    def picture(self, name: str, path: Path, step: int) -> None:
        self._each(lambda logger: logger.picture(name, path, step))

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


# ----------------------------------------------------------------
# What rank 0 shows of a run: a bar in a terminal, a line every few steps elsewhere.

Show = Any  # a function (metrics of the step, title=...)

# Figures of measured steps: shown until the next step is measured.
_OF_MEASURED_STEPS = (
    "measured_steps", "measured_bubble_rate", "predicted_bubble_rate", "peak_memory_bytes",
)  # fmt: skip


@contextmanager
def progress(
    num_steps: int,
    *,
    shown: bool,
    print_every: int,
    title: str,
    first: int = 0,
    note: str = "",
    console: Console | None = None,
) -> Iterator[Show]:
    """Yields a function to call with each step's metrics; its argument `title` replaces `title` in that line.

    first: how many of the steps were done before, by the run that this one continues. note: stands beside the
    measured bubble.
    """
    console = console or Console()
    line = _Line(num_steps, note)
    if not shown:
        yield lambda metrics, title=title: None
    elif console.is_terminal:
        with Progress(*_columns(), console=console, expand=True) as bar:
            task = bar.add_task(title, total=num_steps, completed=first, eta="", figures="")

            def advance(metrics: Mapping[str, Any], title: str = title) -> None:
                eta, figures = line.of(metrics)
                bar.update(task, completed=metrics["step"], description=title, eta=eta, figures=figures)

            yield advance
    else:

        def show(metrics: Mapping[str, Any], title: str = title) -> None:
            step, words = metrics["step"], [each for each in line.of(metrics) if each]
            if step % print_every == 0 or step == num_steps or "expected_makespan_ms" in metrics:
                print("  ".join([title, f"step {step}/{num_steps}", *words]), flush=True)

        yield show


_BAR = 12  # characters


def _columns() -> tuple[ProgressColumn, ...]:
    """Title, bar, step and ETA in full; the figures get the rest of the line, and are cut at its end."""
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(_BAR),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[eta]}", table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[figures]}", table_column=rest),
    )


class _Line:
    """A line per step: when the run will be over; its metrics, and the figures of the last measured step."""

    def __init__(self, num_steps: int, note: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps, self._note, self._clock = num_steps, note, clock
        self._measured: dict[str, Any] = {}
        self._num_skipped = 0
        self._since: tuple[int, float] | None = None  # a step, and when it was done

    def of(self, metrics: Mapping[str, Any]) -> tuple[str, str]:
        """(`ETA 0:00:16`, or nothing; the figures)."""
        self._measured |= {key: metrics[key] for key in _OF_MEASURED_STEPS if key in metrics}
        self._num_skipped += bool(metrics.get("skipped"))
        skipped = [f"skipped {self._num_skipped}"] if self._num_skipped else []
        figures = "  ".join([*skipped, brief({**self._measured, **metrics}, self._note)])
        return self._remaining(metrics["step"]), figures

    def _remaining(self, step: int) -> str:
        """The time that the remaining steps will take; unknown at the first one, which is slow."""
        now = self._clock()
        if self._since is None:
            self._since = step, now
        first, begin = self._since
        if step == first or step >= self._num_steps:
            return ""
        return f"ETA {duration((now - begin) / (step - first) * (self._num_steps - step))}"


def brief(metrics: Mapping[str, Any], note: str = "") -> str:
    """A step's metrics in one line; note: on the bubble.

    At the end stands what a narrow terminal may cut: which steps were measured.
    """
    words = [f"loss {metrics['loss']:.4f}"]
    words += [
        f"{speed:,.0f} {key.removesuffix('_per_second')}/s"
        for key, speed in metrics.items()
        if key.endswith("_per_second")
    ]
    if "padding" in metrics:
        words.append(f"padding {100 * metrics['padding']:.1f} %")
    if "model_flops_utilisation" in metrics:
        words.append(f"MFU {100 * metrics['model_flops_utilisation']:.1f} %")
    if "measured_bubble_rate" in metrics:
        measured, predicted = metrics["measured_bubble_rate"], metrics["predicted_bubble_rate"]
        noted = f", {note}" if note else ""
        words.append(f"bubble {100 * measured:.1f} % (predicted {100 * predicted:.1f} %{noted})")
    if "peak_memory_bytes" in metrics:
        words.append(f"memory {metrics['peak_memory_bytes'] / 2**30:.2f} GiB")
    words += [
        f"held-out {value:.4f}"
        if key == "evaluation_loss"
        else f"{key.removeprefix('evaluation_')} {value:.4f}"
        for key, value in metrics.items()
        if key.startswith("evaluation_")
    ]
    if "expected_makespan_ms" in metrics:
        measured, expected = metrics["measured_makespan_ms"], metrics["expected_makespan_ms"]
        words.append(f"measured makespan {measured:.1f} ms, predicted for the new plan {expected:.1f} ms")
    if "measured_steps" in metrics:
        words.append(f"measured: {metrics['measured_steps']}")
    return "  ".join(words)
