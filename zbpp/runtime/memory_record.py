"""The bytes that a rank holds before, during and after each action of one step, and what outlives the step.

    record = MemoryRecord(pipeline.device)
    with record.step(static), pipeline.recording(record.recorder):
        pipeline.step(x, target=y)

On CUDA the allocator counts. On the CPU a dispatch mode does (live_tensors.py): it knows the tensors that are
given to it and those made during the step, and not what an operator needs inside for itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.autograd.storages import storages_of
from zbpp.runtime.live_tensors import LiveTensors
from zbpp.runtime.measure import Recorder
from zbpp.schedule import Action
from zbpp.schedule.lower import Instruction

_MOST_NAMED = 5  # leftovers


class Span(NamedTuple):
    """Bytes before and after an action, and the most while it ran and until the next one began."""

    action: Action
    before: int
    highest: int
    after: int


class Leftover(NamedTuple):
    """Memory that was made in a step and outlives it; owner: who refers to it, as far as it can be found."""

    size: int
    owner: str


class _Counter:
    """What both ways to count offer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live = LiveTensors() if device.type != "cuda" else None

    @property
    def live(self) -> LiveTensors | None:
        return self._live

    def now(self) -> int:
        if self._live is not None:
            return self._live.now
        return torch.cuda.memory_allocated(self._device)

    def highest(self) -> int:
        """The most since the last call of `mark`."""
        if self._live is not None:
            return self._live.highest
        return torch.cuda.max_memory_allocated(self._device)

    def mark(self) -> None:
        if self._live is not None:
            self._live.mark()
        else:
            torch.cuda.reset_peak_memory_stats(self._device)


class MemoryRecorder(Recorder):
    """Takes the level where a Recorder takes the time."""

    def __init__(self, device: torch.device, counter: _Counter) -> None:
        super().__init__(device)
        self._counter, self._levels = counter, list[tuple[int, int]]()
        self._of: Sequence[Instruction | None] = ()

    def begin(self, instructions: Sequence[Instruction | None]) -> Callable[[], None]:
        """Start a new record; the function notes the level, and the highest since it was called before."""
        self._of, self._levels = instructions, []
        levels, counter = self._levels, self._counter
        counter.mark()

        def mark() -> None:
            levels.append((counter.now(), counter.highest()))
            counter.mark()

        return mark

    def reduction(self, stage: int) -> Callable[[], None]:
        """Reductions are not recorded."""
        return lambda: None

    def spans(self) -> Iterator[Span]:
        """Each action with its levels."""
        pairs = zip(self._levels[::2], self._levels[1::2], strict=True)
        last: Span | None = None
        for instruction, ((before, waited), (after, highest)) in zip(self._of, pairs, strict=True):
            is_action = isinstance(instruction, Action)
            if last is not None:
                last = last._replace(highest=max(last.highest, waited, 0 if is_action else highest))
            if isinstance(instruction, Action):
                if last is not None:
                    yield last
                last = Span(instruction, before, highest, after)
        if last is not None:
            yield last


class MemoryRecord:
    """One step's memory. spans, leftovers: filled when the step has ended.

    before, after: bytes before and after the whole step. highest: the most at any time of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._counter = _Counter(device)
        self.recorder = MemoryRecorder(device, self._counter)
        self.spans: list[Span] = []
        self.leftovers: list[Leftover] = []
        self.before = self.after = self.highest = 0

    @property
    def how(self) -> str:
        """What counted."""
        return "the CUDA allocator" if self._counter.live is None else "a count of live tensors on the CPU"

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors of this step that no operator made; on CUDA all are counted anyway."""
        if self._counter.live is not None:
            self._counter.live.count(tensors)

    @contextmanager
    def step(
        self,
        static: Callable[[], Iterable[Tensor]],
        on_host: Callable[[], Iterable[Tensor]] = tuple,
    ) -> Iterator[None]:
        """Record the step inside. static(): the tensors that stay: weights, gradients, states, buffers.

        on_host(): tensors in host memory, which don't count.
        """
        live = self._counter.live
        if live is None:
            self.before = self._counter.now()
            yield
            self.after = self._counter.now()
            self.spans = list(self.recorder.spans())
            known = {storage.data_ptr() for each in static() for storage in storages_of(each)}
            del known
        else:
            with live:
                live.ignore(on_host())
                live.count(static())
                self.before = live.now
                yield
                gc.collect()
                self.after = live.now
                self.spans = list(self.recorder.spans())
            self.leftovers = _leftovers(live, [*static(), *on_host()])
        self.highest = max([self.before, self.after, *(each.highest for each in self.spans)])


def _leftovers(live: LiveTensors, static: Iterable[Tensor]) -> list[Leftover]:
    """The largest memories that are alive and don't belong to the tensors that stay."""
    staying = {storage._cdata for each in static for storage in storages_of(each)}
    found = [each for each in live.alive() if each._cdata not in staying and each.nbytes()]
    found.sort(key=lambda each: each.nbytes(), reverse=True)
    return [Leftover(each.nbytes(), _owner(each)) for each in found[:_MOST_NAMED]]


def _owner(storage: torch.UntypedStorage) -> str:
    """Who refers to a tensor with this memory: an attribute of an object, or a closure's variable."""
    for tensor in (each for each in gc.get_objects() if _has(each, storage)):
        for referrer in gc.get_referrers(tensor):
            name = _named(referrer, tensor)
            if name:
                return name
    return "nobody that Python's garbage collector knows: a graph of autograd, perhaps"


def _has(value: Any, storage: torch.UntypedStorage) -> bool:
    if not issubclass(type(value), Tensor):  # isinstance would ask the object, and some objects warn
        return False
    try:
        return any(each._cdata == storage._cdata for each in storages_of(value))
    except (RuntimeError, NotImplementedError, ReferenceError):  # a tensor without memory of its own
        return False


def _named(referrer: Any, value: Any, depth: int = 3) -> str:
    """How a referrer calls a value; empty if it is none of the user's."""
    if isinstance(referrer, FrameType) or depth == 0:
        return ""
    if isinstance(referrer, CellType):
        return _closure(referrer)
    if isinstance(referrer, dict):
        key = next((each for each, found in referrer.items() if found is value), None)
        owner = _owner_of_dict(referrer)
        return f"{owner}{f'.{key}' if owner else key}" if key is not None and (owner or depth < 3) else ""
    if isinstance(referrer, list | tuple | set):
        for outer in gc.get_referrers(referrer):
            name = _named(outer, referrer, depth - 1)
            if name:
                return f"{name}, a {type(referrer).__name__}"
    return ""


def _closure(cell: CellType) -> str:
    for outer in gc.get_referrers(cell):
        for function in gc.get_referrers(outer):
            code = getattr(function, "__code__", None)
            if code is not None and cell in (function.__closure__ or ()):
                name = code.co_freevars[function.__closure__.index(cell)]
                return f"{name} in the closure of {function.__qualname__}"
    return ""


def _owner_of_dict(namespace: dict[Any, Any]) -> str:
    """The object or module whose attributes these are."""
    for holder in gc.get_referrers(namespace):
        if getattr(holder, "__dict__", None) is namespace:
            return getattr(holder, "__name__", "") or type(holder).__qualname__
    if "__name__" in namespace:
        return str(namespace["__name__"])
    return ""
