"""What waits for the whole device? A kernel sleeps on a stream of its own; does the call return before it?

A receive of NCCL that waits for its peer is such a kernel. Whatever waits for it while the peer waits for
this rank hangs the job. Asked twice, by two parts: with zbpp's settings (modules loaded eagerly, expandable
segments), and with torch's and CUDA's own.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_check.page import Page

SLEEP, _LONG_SLEEP = 0.4, 8.0  # s; the longer one where something is compiled
_RETURN = 0.2  # s after the kernel's end in which a call that waits for it returns
SETTINGS = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF")


def run(page: Page) -> None:
    page.say(", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in SETTINGS))
    Waits(page).all()


class Waits:
    """The calls, in an order in which each is the first of its kind in this process."""

    def __init__(self, page: Page) -> None:
        self.page, self.here = page, page.here
        begin = time.perf_counter()
        self.x = torch.ones(64, 64, device=self.here.device)
        self.here.synchronize()
        page.say(f"the first tensor took {time.perf_counter() - begin:.2f} s")
        if self.here.is_cuda:
            torch.empty(1 << 28, dtype=torch.uint8, device=self.here.device)  # memory for what follows
            self.side = torch.cuda.Stream()
            self.cycles = self._cycles_per_second()

    def all(self) -> None:
        x = self.x
        ask = self.ask
        ask("torch.cuda.synchronize", "waits", self.here.synchronize)
        ask("an event of the current stream", "does not wait", self._event)
        ask("a sum: a first kernel of its kind", "", lambda: x.sum())
        ask("a number to the host", "does not wait", lambda: x.sum().item())
        ask("first product, this thread: a cuBLAS handle", "", lambda: x @ x)
        ask("first product in autograd's thread: another handle", "", self._backward)
        ask("first product in bfloat16", "", lambda: x.bfloat16() @ x.bfloat16())
        ask("first attention", "", self._attention)
        ask("a copy from ordinary host memory", "", lambda: torch.ones(1 << 20).to(self.here.device))
        ask("cudaMalloc of 1 GiB", "", lambda: self._allocate(1 << 30))
        ask("cudaFree, by empty_cache", "waits; not with expandable segments", self._empty_cache)
        if not self.here.is_cuda:
            return
        ask(
            "pinned allocation of 256 MiB",
            "",
            lambda: torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True),
        )
        ask("a new stream and its event", "does not wait", lambda: torch.cuda.Stream().record_event())
        ask("mem_get_info", "", lambda: torch.cuda.mem_get_info())
        ask("capture and instantiation of a graph", "", self._graph)
        ask("first replay of a graph", "does not wait", lambda: self.graph.replay())
        ask("torch.cuda.graph, which synchronizes", "waits", self._torch_graph)
        if self.here.compiler == "inductor":
            importlib.import_module("torch._inductor.compile_fx")  # takes seconds, and nothing of the device
            ask("Inductor: compile, load, launch", "", self._compiled, _LONG_SLEEP)
            ask("the same, launched again", "does not wait", lambda: self.compiled(x))
            ask("Inductor's benchmarker, as in autotuning", "waits", self._benchmark, 2.0)
            ask("a reduction with several Triton configs", "", self._reduction, _LONG_SLEEP)
        else:
            self.page.skip("Inductor and Triton", "no triton here")

    def ask(self, what: str, predicted: str, call: Callable[[], Any], sleep: float = SLEEP) -> None:
        """One call while a kernel sleeps."""

        def measure() -> str:
            if not self.here.is_cuda:
                call()
                return "no device to wait for"
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(int(sleep * self.cycles))
                ended = torch.cuda.Event()
                ended.record()
            begin = time.perf_counter()
            call()
            took, is_over = time.perf_counter() - begin, ended.query()
            torch.cuda.synchronize()
            waits = "waits" if took < sleep + _RETURN else "waits, or took longer than the kernel"
            verdict = waits if is_over else "does not wait"
            return f"{verdict}: {took:.3f} s beside a kernel of {sleep:g} s"

        self.page.note(what, predicted or "unknown", measure)

    def _cycles_per_second(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            begin.record()
            torch.cuda._sleep(20_000_000)
            end.record()
            torch.cuda.synchronize()
        return 20_000_000 / (begin.elapsed_time(end) / 1e3)

    def _event(self) -> None:
        if self.here.is_cuda:
            torch.cuda.current_stream().record_event().synchronize()

    def _backward(self) -> None:
        weight = torch.ones(64, 64, device=self.here.device, requires_grad=True)
        (self.x @ weight).sum().backward()

    def _attention(self) -> None:
        q = torch.ones(1, 4, 64, 64, device=self.here.device, dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def _allocate(self, nbytes: int) -> None:
        self.large = torch.empty(self.here.choose(nbytes, 1024), dtype=torch.uint8, device=self.here.device)

    def _empty_cache(self) -> None:
        del self.large
        if self.here.is_cuda:
            torch.cuda.empty_cache()

    def _graph(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            self.captured = self.x * 2
            self.graph.capture_end()

    def _torch_graph(self) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            self.x * 3

    def _compiled(self) -> None:
        self.compiled = torch.compile(lambda x: torch.tanh(x) * x.sum(-1, keepdim=True))
        self.compiled(self.x)

    def _benchmark(self) -> None:
        from torch._inductor.runtime.benchmarking import benchmarker

        benchmarker.benchmark_gpu(lambda: self.x + 1)

    def _reduction(self) -> None:
        torch.compile(lambda x: x.float().softmax(-1).sum(0))(self.x.repeat(8, 64))
