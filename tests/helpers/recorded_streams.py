"""A device layer that records which stream does what, and finds what no event orders. It runs on the CPU.

    with recorded() as device:
        pipeline.step(x, target=x)
    assert device.faults == []

Within `recorded` the CPU has streams (zbpp/streams.py). Work is done at once, by the CPU. But each access to
memory is noted with its stream, and streams and host have vector clocks, which events join. So an access is
known to come after another one only if the program made it so, as on a GPU. Faults are

    two accesses to the same memory, one of them a write, which no event orders
    memory freed while another stream may still use it: the stream that owns it may write there next

What counts as an access: all that torch's dispatcher sees, except views and empty tensors. Memory made by
`host_memory` or `on_host` is the host's; an operation on host memory alone is the host's work. Where an
operation of the host needs a result of the device, the host waits: `num_waits` counts that, also a copy
between host and device that is not non_blocking.

Not seen: work without the dispatcher, and what hardware adds (copy engines, priorities, lost launches).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpp.streams import MAKERS

Clock = dict[str, int]  # {stream or "host": how many of its operations are known to have ended}
HOST = "host"
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_"}


def _join(clock: Clock, other: Clock) -> None:
    for name, number in other.items():
        clock[name] = max(number, clock.get(name, 0))


@dataclass(eq=False)
class FakeEvent:
    device: RecordedStreams
    clock: Clock
    ms: float

    def synchronize(self) -> None:
        self.device.wait_on_host(self.clock)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.ms - self.ms


@dataclass(eq=False)
class FakeStream:
    device: RecordedStreams
    name: str
    clock: Clock = field(default_factory=dict)

    def wait_event(self, event: FakeEvent) -> None:
        self.device.look()
        _join(self.clock, event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> FakeEvent:
        self.device.look()
        return FakeEvent(self.device, dict(self.clock), next(self.device.ms))

    def synchronize(self) -> None:
        self.device.wait_on_host(self.clock)


@dataclass(eq=False)
class _Memory:
    """One storage. Accesses: {stream: (number of its operation, name of the operation)}."""

    reference: StorageWeakRef
    owner: FakeStream
    nbytes: int
    is_host: bool
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)
    writes: dict[str, tuple[int, str]] = field(default_factory=dict)


class RecordedStreams(TorchDispatchMode):
    """See above. faults: texts. num_waits: how often the host waited for the device, waits: where."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.num_waits = 0
        self.waits: list[str] = []
        self.ms = count()
        self.main = FakeStream(self, "compute")
        self.streams = [self.main]
        self._host: Clock = {}
        self._memories: dict[int, _Memory] = {}
        self._local = threading.local()
        self._lock = threading.RLock()

    # ---- As zbpp.streams.Streams

    def current(self) -> FakeStream:
        self.look()
        return self._stack[-1]

    def side(self, what: str) -> FakeStream:
        stream = FakeStream(self, f"{what} {len(self.streams)}")
        self.streams.append(stream)
        return stream

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        with ExitStack() as stack:
            if not getattr(self._local, "is_recording", False):  # another thread than the test's
                stack.enter_context(self.recording())
            self._stack.append(stream)
            try:
                yield
            finally:
                self.look()
                self._stack.pop()

    def mark(self) -> FakeEvent:
        return self._stack[-1].record_event()

    def fence(self) -> FakeEvent:
        return self.mark()

    def host_memory(self, nbytes: int) -> Tensor:
        return self.on_host(torch.empty(nbytes, dtype=torch.uint8))

    def moved(self, tensor: Tensor) -> Tensor:
        pinned = self.on_host(tensor.clone())
        return torch.empty_like(pinned).copy_(pinned, non_blocking=True)

    def synchronize(self) -> None:
        for stream in self.streams:
            _join(stream.clock, self._host)
        for stream in self.streams:
            _join(self._host, stream.clock)
        self._waited("synchronize")

    # ---- For tests

    @contextmanager
    def recording(self) -> Iterator[RecordedStreams]:
        """Record what the calling thread does."""
        self._local.is_recording = True
        try:
            with self:
                yield self
        finally:
            self._local.is_recording = False

    def on_host(self, tensor: Tensor) -> Tensor:
        """Say that the tensor's memory is the host's."""
        self._memory_of(tensor).is_host = True
        return tensor

    def wait_on_host(self, clock: Clock) -> None:
        """The host waits."""
        _join(self._host, clock)
        self._waited("event")

    def look(self) -> None:
        """See which memory has been freed since."""
        with self._lock:
            for key, memory in list(self._memories.items()):
                storage = torch.UntypedStorage._new_with_weak_ptr(memory.reference.cdata)
                nbytes = 0 if storage is None else storage.nbytes()
                if memory.nbytes and not nbytes:
                    self._freed(memory)
                if storage is None:
                    del self._memories[key]
                elif nbytes != memory.nbytes:  # emptied or filled again, by resize_
                    self._memories[key] = _Memory(memory.reference, self._stack[-1], nbytes, memory.is_host)

    # ---- Recording

    @property
    def _stack(self) -> list[FakeStream]:
        if not hasattr(self._local, "stack"):
            self._local.stack = [self.main]
        return self._local.stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._lock:
            self.look()
            result = func(*args, **(kwargs or {}))
            self._note(func, args, kwargs or {}, result)
            return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, schema = func.overloadpacket.__name__, func._schema
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if name in _EMPTY:
            for each in outputs:
                self._memory_of(each)
            return
        returns = [each.alias_info for each in schema.returns]
        if name in ("detach", "alias") or (returns and all(each and not each.is_write for each in returns)):
            return  # a view
        read, written = [], []
        for place, argument in enumerate(schema.arguments):
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tensors)
        known = {id(self._memory_of(each)) for each in (*read, *written)}
        is_host = bool(known) and all(self._memory_of(each).is_host for each in (*read, *written))
        for each in outputs:
            memory = self._memory_of(each)
            if id(memory) not in known:
                memory.is_host = is_host
                written.append(each)
        if read or written:
            self._access(name, read, written, is_host=is_host)
        if name == "_local_scalar_dense" and not is_host:
            self.wait_on_host(self._stack[-1].clock)
        if name == "copy_" and not is_host and not kwargs.get("non_blocking", args[2:] == (True,)):
            both = {self._memory_of(each).is_host for each in (*read, *written)}
            if len(both) == 2:
                self.wait_on_host(self._stack[-1].clock)

    def _access(self, name: str, read: list[Tensor], written: list[Tensor], *, is_host: bool) -> None:
        stream = self._stack[-1]
        clock, who = (self._host, HOST) if is_host else (stream.clock, stream.name)
        if not is_host:
            _join(clock, self._host)  # work starts after the host has launched it
        clock[who] = clock.get(who, 0) + 1
        for tensor in read:
            memory = self._memory_of(tensor)
            self._check(memory.writes, clock, f"{name} on {who} reads memory", memory)
            memory.reads[who] = clock[who], name
        for tensor in written:
            memory = self._memory_of(tensor)
            self._check(memory.writes, clock, f"{name} on {who} writes memory", memory)
            self._check(memory.reads, clock, f"{name} on {who} writes memory", memory, what="reads")
            memory.writes[who] = clock[who], name

    def _check(
        self,
        accesses: dict[str, tuple[int, str]],
        clock: Clock,
        text: str,
        memory: _Memory,
        what: str = "writes",
    ) -> None:
        for who, (number, name) in accesses.items():
            if clock.get(who, 0) < number:
                self.faults.append(f"{text} that {name} on {who} {what}: no event orders them")

    def _freed(self, memory: _Memory) -> None:
        if memory.is_host:  # the allocator of pinned memory waits for copies itself
            return
        clock = dict(memory.owner.clock)
        _join(clock, self._host)
        for accesses in (memory.reads, memory.writes):
            for who, (number, name) in accesses.items():
                if clock.get(who, 0) < number:
                    self.faults.append(
                        f"memory of {memory.owner.name} is freed, and {name} on {who} may still use it"
                    )

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        known = self._memories.get(storage._cdata)
        if known is None:
            known = _Memory(StorageWeakRef(storage), self._stack[-1], storage.nbytes(), False)
            self._memories[storage._cdata] = known
        return known

    def _waited(self, why: str) -> None:
        self.num_waits += 1
        self.waits.append(f"{why} in {threading.current_thread().name}")


@contextmanager
def recorded() -> Iterator[RecordedStreams]:
    """Within it the CPU has streams, which are recorded."""
    device = RecordedStreams()
    MAKERS["cpu"] = lambda _: device
    try:
        with device.recording():
            yield device
    finally:
        del MAKERS["cpu"]
