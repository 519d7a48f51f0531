"""torch.cuda on the emulated device: what a CPU build of torch leaves out of it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import cuda

from accelerator.load import library

_GIB = 2**30
_MEMORY = 80 * _GIB
_STATISTICS = (
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
    *("allocation", "segment", "active"),
)


class _Properties:
    """Of an H100, or of another capability: $ZBPP_TEST_CAPABILITY."""

    name = "CUDA on the CPU"
    major, minor = int(os.environ.get("ZBPP_TEST_CAPABILITY", "9")), 0
    total_memory, multi_processor_count, L2_cache_size = _MEMORY, 132, 50 * 2**20
    warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 2048, 65536
    shared_memory_per_block_optin, gcnArchName, is_integrated, uuid = 232448, "", 0, "0"


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
        if "stream_id" in given:
            return torch.Stream.__new__(cls, **given)
        cuda._lazy_init()
        return torch.Stream.__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    def __init__(self, *args: Any, **given: Any) -> None:
        pass

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class ExternalStream(Stream):
    """As torch.cuda.ExternalStream."""


class Event(torch.Event):
    """As torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **given: Any
    ) -> Any:
        made = torch.Event.__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)
        made._is_timed, made._time = enable_timing, None
        return made

    def __init__(self, *args: Any, **given: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        super().record(cuda.current_stream() if stream is None else stream)
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        super().wait(cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end: Any) -> float:
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._time - self._time) * 1000


_pools: dict[tuple[int, int], Any] = {}


class CUDAGraph:
    """As torch.cuda.CUDAGraph: see csrc/capture.h."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph, self._handle = library.Graph(), (0, 0)

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        self._handle = graph_pool_handle() if pool is None else pool
        self._graph.begin(_pools[self._handle])

    def capture_end(self) -> None:
        self._graph.end()

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        return self._handle


def graph_pool_handle() -> tuple[int, int]:
    """As torch.cuda.graph_pool_handle."""
    handle = (0, len(_pools) + 1)
    _pools[handle] = library.Pool()
    return handle


class _Fork:
    """A process that has asked the driver anything can't use CUDA in its forks."""

    was_used, is_bad = False, False

    @classmethod
    def use(cls) -> None:
        cls.was_used = True

    @classmethod
    def in_child(cls) -> None:
        if cls.was_used:
            cls.is_bad = True
            library.forked(True)


def install() -> None:
    """Complete torch.cuda."""
    os.register_at_fork(after_in_child=_Fork.in_child)
    for name, function in _FUNCTIONS_OF_C.items():
        setattr(torch._C, name, function)
    cuda._cudart = object()
    cuda._queued_calls.clear()
    cuda._is_in_bad_fork = torch._C._cuda_isInBadFork
    cuda._exchange_device = torch._C._cuda_exchangeDevice
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    cuda.device_count = lambda: library.device_count  # torch asks NVML, and not the driver
    cuda.get_device_properties = _properties
    cuda.get_device_name = lambda device=None: _properties(device).name
    cuda.get_device_capability = lambda device=None: (_properties(device).major, _properties(device).minor)
    cuda.mem_get_info = cuda.memory.mem_get_info = _memory_left
    for each in (Stream, Event, ExternalStream):
        setattr(cuda, each.__name__, each)
        setattr(cuda.streams, each.__name__, each)
    for module in (cuda, cuda.graphs):
        module.CUDAGraph, module.graph_pool_handle = CUDAGraph, graph_pool_handle
        module.is_current_stream_capturing = library.is_capturing
    torch.version.cuda = "12.8"
    torch.UntypedStorage.resize_ = _resize


def _initialise() -> None:
    generators = tuple(map(library.default_generator, range(library.device_count)))
    cuda.default_generators = cuda.random.default_generators = generators


def _set_device(index: int) -> None:
    _Fork.use()
    library.exchange_device(index)


def _device_count() -> int:
    _Fork.use()
    return library.device_count


def _index(device: Any = None) -> int:
    if device is None:
        return library.current_device()
    return cuda._utils._get_device_index(device, optional=True)


def _properties(device: Any = None) -> _Properties:
    cuda._lazy_init()
    if _index(device) >= library.device_count:
        raise AssertionError("Invalid device id")
    return _Properties()


def _memory_left(device: Any = None) -> tuple[int, int]:
    return _MEMORY - library.allocated(_index(device)), _MEMORY


def _memory_stats(index: int) -> dict[str, Any]:
    now, most = library.allocated(index), library.peak(index)
    each = {"current": now, "peak": most, "allocated": most, "freed": most - now}
    pools = {"all": each, "large_pool": each, "small_pool": each}
    counts = {"num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0}
    return counts | dict.fromkeys(_STATISTICS, pools)


_resize_on_cpu = torch.UntypedStorage.resize_


def _resize(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _resize_on_cpu(self, nbytes)
    holder = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
    library.resize_storage(holder, nbytes)
    return self


_FUNCTIONS_OF_C = {
    "_cuda_init": _initialise,
    "_cuda_isInBadFork": lambda: _Fork.is_bad,
    "_cuda_getDeviceCount": _device_count,
    "_cuda_getDevice": library.current_device,
    "_cuda_setDevice": _set_device,
    "_cuda_exchangeDevice": library.exchange_device,
    "_cuda_maybeExchangeDevice": library.maybe_exchange_device,
    "_cuda_synchronize": lambda: library.synchronize(library.current_device()),
    "_cuda_getCurrentStream": lambda device: (library.current_stream(device), device, 1),
    "_cuda_getDefaultStream": lambda device: (0, device, 1),
    "_cuda_setStream": lambda stream_id, device_index, device_type: library.set_stream(
        device_index, stream_id
    ),
    "_cuda_getCurrentRawStream": library.current_stream,
    "_cuda_sleep": lambda cycles: time.sleep(cycles / 2e9),
    "_cuda_isCurrentStreamCapturing": library.is_capturing,
    "_cuda_getArchFlags": lambda: "sm_80 sm_90",
    "_cuda_getCompiledVersion": lambda: 12080,
    "_cuda_memoryStats": _memory_stats,
    "_cuda_memorySnapshot": lambda *given: {"segments": []},  # memory is the host's, in no segments
    "_cuda_resetPeakMemoryStats": library.reset_peak,
    "_cuda_resetAccumulatedMemoryStats": lambda device: None,
    "_cuda_emptyCache": lambda: None,
    "_host_emptyCache": lambda: None,
    "_accelerator_setAllocatorSettings": lambda settings: None,
    "_cuda_cudaCachingAllocator_set_allocator_settings": lambda settings: None,
    "_nccl_version": lambda: (2 << 32) | (29 << 16) | 3,
    "_nccl_version_suffix": lambda: b"",
}
