"""A pipeline makes one call at a time: its stages hold the microbatches of one call."""

from __future__ import annotations

from threading import Lock


class OneCall:
    """Entered by each call. A call that begins while another one runs is refused, and changes nothing."""

    def __init__(self) -> None:
        self._running = Lock()

    def __enter__(self) -> None:
        """Raises RuntimeError if a call runs: in another thread, or around this one."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "this pipeline is in a call already: step, evaluate and predict run one at a time, not in "
                "several threads, and not inside a stage, a loss or a metric of another call"
            )

    def __exit__(self, *_: object) -> None:
        self._running.release()
