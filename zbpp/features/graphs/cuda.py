"""Graphs on CUDA, by torch.cuda.CUDAGraph; see GraphMaker in capture.py. (Not run on a GPU yet.)"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from zbpp.streams import streams_of


class TorchGraphs:
    """Captures on one stream of its own, which the eager steps before a capture use, too, as torch asks.

    Old graphs must be gone before a new capture: when one is freed, torch drops the workspaces of the matrix
    products that were captured on its stream (pytorch issue 193402).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        streams = streams_of(device)
        assert streams is not None  # a GPU has streams
        self._streams, self._stream = streams, streams.side("graphs")
        self._pool: Any = None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """On the stream of the captures: nothing is initialised in a capture, or is of another stream."""
        with self._on_stream():
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Begin a pool. Garbage is not collected meanwhile: to free an old graph would end the capture."""
        self._streams.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with self._on_stream(), warnings.catch_warnings():
                # An action may have nothing to do, such as the W of a stage whose weights B has served.
                warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
                yield
        finally:
            if was_enabled:
                gc.enable()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record a function's kernels.

        Other threads (a data loader that pins memory, NCCL's watchdog) may use CUDA meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with suppress(RuntimeError):  # it tells again that the capture has failed
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        current = self._streams.current()
        self._stream.wait_stream(current)
        try:
            with self._streams.use(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
