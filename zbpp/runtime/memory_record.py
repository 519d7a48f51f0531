"""The bytes that a rank holds before, during and after each action of one step, and what outlives the step.

    record = MemoryRecord(pipeline.device)
    with record.step(static), pipeline.using(record.recorder):
        pipeline.step(x, target=y)

On CUDA the allocator's figures are taken. On the CPU a dispatch mode counts (live_tensors.py): it counts the
tensors that the caller names (`static`) and those that operators return during the step, but not the memory
that an operator allocates for itself and frees.
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
from zbpp.runtime.measure import Recorder, StepRecord
from zbpp.schedule import Action
from zbpp.schedule.lower import Instruction

_MOST_NAMED = 5  # leftovers in the report, the largest


class Span(NamedTuple):
    """The bytes before and after an action. highest: the most from its begin to the next action's begin."""

    action: Action
    before: int
    highest: int
    after: int


class Leftover(NamedTuple):
    """Memory that was allocated in a step and outlives it.

    owner: the text names the object or closure that refers to the memory, as far as it can be found.
    """

    size: int
    owner: str


class _Counter:
    """Counts bytes on a device: by CUDA's allocator, or on the CPU by LiveTensors (`live`)."""

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
        """The most bytes since the last call of `mark`."""
        if self._live is not None:
            return self._live.highest
        return torch.cuda.max_memory_allocated(self._device)

    def mark(self) -> None:
        if self._live is not None:
            self._live.mark()
        else:
            torch.cuda.reset_peak_memory_stats(self._device)


class MemoryLevels(StepRecord):
    """A record of the bytes held, where a plain StepRecord has the times."""

    def __init__(self, device: torch.device, counter: _Counter) -> None:
        super().__init__(device)
        self._counter, self._levels = counter, list[tuple[int, int]]()
        self._of: Sequence[Instruction | None] = ()

    def begin(self, instructions: Sequence[Instruction | None]) -> Callable[[], None]:
        """Start a new record. The returned function notes the level, and the highest since its last call."""
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
        """The levels of each action. What happens after an action counts for its `highest`."""
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
    """One step's memory. The attributes are filled when the step has ended.

    spans: the levels of each action. leftovers: the largest memories that outlive the step; none on CUDA.
    before, after: the bytes before and after the whole step. highest: the most at any time of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._counter = _Counter(device)
        self._levels = MemoryLevels(device, self._counter)
        self.recorder = Recorder(self._levels)
        self.spans: list[Span] = []
        self.leftovers: list[Leftover] = []
        self.before = self.after = self.highest = 0

    @property
    def how(self) -> str:
        """How the bytes were counted, in words."""
        return "the CUDA allocator" if self._counter.live is None else "a count of live tensors on the CPU"

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors of this step that no operator returned (the batch). CUDA's allocator counts all."""
        if self._counter.live is not None:
            self._counter.live.count(tensors)

    @contextmanager
    def step(
        self,
        static: Callable[[], Iterable[Tensor]],
        on_host: Callable[[], Iterable[Tensor]] = tuple,
    ) -> Iterator[None]:
        """Record the step that runs within this context.

        static(): the tensors that stay from step to step: weights, gradients, optimizer states, buffers.
        on_host(): tensors in host memory, which don't count.
        """
        live = self._counter.live
        if live is None:
            self.before = self._counter.now()
            yield
            self.after = self._counter.now()
            self.spans = list(self._levels.spans())
        else:
            with live:
                live.ignore(on_host())
                live.count(static())
                self.before = live.now
                yield
                gc.collect()
                self.after = live.now
                self.spans = list(self._levels.spans())
            self.leftovers = _leftovers(live, [*static(), *on_host()])
        self.highest = max([self.before, self.after, *(each.highest for each in self.spans)])


def _leftovers(live: LiveTensors, static: Iterable[Tensor]) -> list[Leftover]:
    """The largest storages that are alive and don't belong to the tensors that stay."""
    staying = {storage._cdata for each in static for storage in storages_of(each)}
    found = [each for each in live.alive() if each._cdata not in staying and each.nbytes()]
    found.sort(key=lambda each: each.nbytes(), reverse=True)
    return [Leftover(each.nbytes(), _owner(each)) for each in found[:_MOST_NAMED]]


def _owner(storage: torch.UntypedStorage) -> str:
    """The attribute of an object, or the variable of a closure, that refers to a tensor over this storage."""
    for tensor in (each for each in gc.get_objects() if _is_over(each, storage)):
        for referrer in gc.get_referrers(tensor):
            name = _named(referrer, tensor)
            if name:
                return name
    return "nobody that Python's garbage collector knows: a graph of autograd, perhaps"


def _is_over(value: Any, storage: torch.UntypedStorage) -> bool:
    if not issubclass(type(value), Tensor):  # isinstance would ask the object, and some objects warn
        return False
    try:
        return any(each._cdata == storage._cdata for each in storages_of(value))
    except (RuntimeError, NotImplementedError, ReferenceError):  # a tensor without memory of its own
        return False


def _named(referrer: Any, value: Any, depth: int = 3) -> str:
    """The name under which a referrer holds a value; "" if the referrer is a frame or has no name for it."""
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
    """The name of the object or module whose attributes this dict holds; "" if there is none."""
    for holder in gc.get_referrers(namespace):
        if getattr(holder, "__dict__", None) is namespace:
            return getattr(holder, "__name__", "") or type(holder).__qualname__
    if "__name__" in namespace:
        return str(namespace["__name__"])
    return ""
