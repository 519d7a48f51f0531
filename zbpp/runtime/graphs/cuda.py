"""Graphs on CUDA, by torch.cuda.CUDAGraph; see GraphMaker in maker.py. (Not run on a GPU yet.)"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from zbpp.streams import streams_of


class CudaGraphs:
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
        self._seeds: CudaSeeds | None = None  # of the next graph

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

        Other threads (a data loader that pins memory, NCCL's watchdog) may use CUDA meanwhile. Before torch
        2.13 the memory of a capture that has failed stays taken until the process ends.
        """
        graph = torch.cuda.CUDAGraph()
        if self._seeds is not None:
            self._seeds.register(graph)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with suppress(RuntimeError):  # it tells again that the capture has failed
                graph.capture_end()
            self._leave_state()
            raise
        graph.capture_end()
        return graph.replay

    def _leave_state(self) -> None:
        """Give the generator a copy of its own state, which before torch 2.13 stays in a failed capture."""
        if self._seeds is None:
            generator = torch.cuda.default_generators[self._device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
        else:
            self._seeds.leave_state()

    def seeds(self, count: int) -> CudaSeeds:
        """A state of the generator for each F of the next graph."""
        self._seeds = CudaSeeds(self._device, count)
        return self._seeds

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        current = self._streams.current()
        self._stream.wait_stream(current)
        try:
            with self._streams.use(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


class CudaSeeds:
    """One state of the device's generator per F: the seed of a state can be set before a replay.

    Inside a graph the generator can't be seeded, but it can change from one state to another.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._own = self._generator.graphsafe_get_state()
        self._states = [self._generator.clone_state() for _ in range(count)]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell a graph, before its capture, which states it uses."""
        for each in self._states:
            graph.register_generator_state(each)

    def use(self, number: int) -> None:
        """See Seeds."""
        self._generator.graphsafe_set_state(self._states[number])

    def restore(self) -> None:
        """Give the generator its own state again."""
        self._generator.graphsafe_set_state(self._own)

    def leave_state(self) -> None:
        """Give the generator a copy of its own state; from now on `restore` gives it this copy."""
        self.restore()
        self._own = self._generator.clone_state()
        self.restore()

    def set(self, seeds: list[int]) -> None:
        """See Seeds."""
        for state, seed in zip(self._states, seeds, strict=True):
            state.manual_seed(seed)
