"""What rank 0 shows of a run: a bar in a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from zbpp.training.summary import duration

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
    console: Console | None = None,
) -> Iterator[Show]:
    """Yields a function to call with each step's metrics; its argument `title` replaces `title` in that line.

    first: how many of the steps were done before, by the run that this one continues.
    """
    console = console or Console()
    line = _Line(num_steps)
    if not shown:
        yield lambda metrics, title=title: None
    elif console.is_terminal:
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console
        ) as bar:
            task = bar.add_task(title, total=num_steps, completed=first)

            def advance(metrics: Mapping[str, Any], title: str = title) -> None:
                bar.update(task, completed=metrics["step"], description=f"{title}  {line.of(metrics)}")

            yield advance
    else:

        def show(metrics: Mapping[str, Any], title: str = title) -> None:
            step, text = metrics["step"], line.of(metrics)
            if step % print_every == 0 or step == num_steps or "expected_makespan_ms" in metrics:
                print(f"{title}  step {step}/{num_steps}  {text}", flush=True)

        yield show


class _Line:
    """A line per step: its metrics, the figures of the last measured step, and when the run will be over."""

    def __init__(self, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps, self._clock = num_steps, clock
        self._measured: dict[str, Any] = {}
        self._num_skipped = 0
        self._since: tuple[int, float] | None = None  # a step, and when it was done

    def of(self, metrics: Mapping[str, Any]) -> str:
        self._measured |= {key: metrics[key] for key in _OF_MEASURED_STEPS if key in metrics}
        self._num_skipped += bool(metrics.get("skipped"))
        skipped = [f"skipped {self._num_skipped}"] if self._num_skipped else []
        return "  ".join([brief({**self._measured, **metrics}), *skipped, *self._remaining(metrics["step"])])

    def _remaining(self, step: int) -> list[str]:
        """The time that the remaining steps will take; unknown at the first one, which is slow."""
        now = self._clock()
        if self._since is None:
            self._since = step, now
        first, begin = self._since
        if step == first or step >= self._num_steps:
            return []
        return [f"ETA {duration((now - begin) / (step - first) * (self._num_steps - step))}"]


def brief(metrics: Mapping[str, Any]) -> str:
    """A step's metrics in one line."""
    words = [f"loss {metrics['loss']:.4f}"]
    words += [
        f"{speed:,.0f} {key.removesuffix('_per_second')}/s"
        for key, speed in metrics.items()
        if key.endswith("_per_second")
    ]
    if "model_flops_utilisation" in metrics:
        words.append(f"MFU {100 * metrics['model_flops_utilisation']:.1f} %")
    if "measured_bubble_rate" in metrics:
        measured, predicted = metrics["measured_bubble_rate"], metrics["predicted_bubble_rate"]
        steps = metrics["measured_steps"]
        words.append(f"bubble {100 * measured:.1f} % (predicted {100 * predicted:.1f} %, {steps})")
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
    return "  ".join(words)
