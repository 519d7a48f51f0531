"""The bar that a long search shows on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from time import monotonic

_PATIENCE = 1.0  # s before the bar is drawn


@contextmanager
def bar() -> Iterator[Callable[[float, str], None]]:
    """Yield the function to call with (share done, what is being done).

    It draws a bar on standard error once a second has passed. It draws nothing where standard error is no
    terminal, or rich is missing.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda share, what: None
        return
    from rich.console import Console
    from rich.progress import Progress

    drawn, start = Progress(console=Console(stderr=True), transient=True), monotonic()
    task = drawn.add_task("", total=1.0)

    def show(share: float, what: str) -> None:
        if monotonic() - start > _PATIENCE:
            drawn.start()
            drawn.update(task, completed=share, description=what)

    try:
        yield show
    finally:
        drawn.stop()
