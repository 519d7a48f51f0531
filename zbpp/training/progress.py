"""What rank 0 shows of a run: a bar in a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Show = Any  # a function (metrics of the step, title=...)


@contextmanager
def progress(num_steps: int, *, shown: bool, print_every: int, title: str) -> Iterator[Show]:
    """Yields a function to call with each step's metrics; its `title` replaces the title from there on."""
    console = Console()
    if not shown:
        yield lambda metrics, title=title: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=num_steps)

            def advance(metrics: Mapping[str, Any], title: str = title) -> None:
                bar.update(task, advance=1, description=f"{title}  {brief(metrics)}")

            yield advance
    else:

        def show(metrics: Mapping[str, Any], title: str = title) -> None:
            step = metrics["step"]
            if step % print_every == 0 or step == num_steps or "expected_makespan_ms" in metrics:
                print(f"{title}  step {step}/{num_steps}  {brief(metrics)}", flush=True)

        yield show


def brief(metrics: Mapping[str, Any]) -> str:
    """A step's metrics in one line."""
    words = [f"loss {metrics['loss']:.4f}"]
    words += [
        f"{speed:,.0f} {key.removesuffix('_per_second')}/s"
        for key, speed in metrics.items()
        if key.endswith("_per_second")
    ]
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
