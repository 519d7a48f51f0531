"""CUDA graphs on the CPU: captures record every aten operation, replays run the record again.

As on CUDA
- a capture has no effect: what it changes gets its values back, and so does the generator; what it makes was
  never computed;
- a replay computes into the memory of the capture, and runs no other Python;
- operations whose result the host reads (.item(), nonzero) raise an error inside a capture;
- random numbers of a replay come from the seed that the generator has when the replay starts.

`poison` fills all memory that captures have allocated, as if it had been used for something else: what a
replay doesn't compute itself must lie outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_SYNCS = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten.is_nonzero,
    _aten.equal,
    _aten._unique2,
}


class _Recording(TorchDispatchMode):
    """Runs operations and keeps them, with the tensors that they read and write."""

    def __init__(self, maker: EmulatedGraphs) -> None:
        super().__init__()
        self._maker = maker
        self.operations: list[Callable[[], None]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what the capture has changed, as it was

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._overloadpacket in _SYNCS:
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        if function is _aten.native_batch_norm.default:  # its schema does not say that it changes statistics
            self._keep(args[3])
            self._keep(args[4])
        if function._schema.is_mutable:
            self._keep_mutated(function, args, kwargs)
        made = function(*args, **kwargs)
        self._record(function, *tree_map(_alias, (args, kwargs, made)))
        return made

    def _keep_mutated(self, function: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for each in tree_leaves(value):
                    self._keep(each)

    def _keep(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._maker.pool and address not in self._before:
                whole = _alias(tensor)
                whole = whole.as_strided((whole.untyped_storage().nbytes() // whole.itemsize,), (1,), 0)
                self._before[address] = whole, whole.clone()

    def _record(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        outputs = [each if isinstance(each, Tensor) else None for each in _flat(made)]
        fresh = [None if each is None or _address(each) in given else each for each in outputs]
        for each in fresh:
            if each is not None and each.untyped_storage().nbytes():
                self._maker.pool[_address(each)] = each
        if not function._schema.is_mutable and not any(each is not None for each in fresh):
            return  # a view: it is where it was

        def again() -> None:
            results = _flat(function(*args, **kwargs))
            for place, result in zip(fresh, results, strict=True):
                if place is not None:
                    place.copy_(result)

        self.operations.append(again)
        for each in tree_leaves((args, kwargs, made)):
            if isinstance(each, Tensor):
                self._maker.records[_address(each)] += 1

    def undo(self) -> None:
        """Give all that the capture has changed its values back."""
        for tensor, before in self._before.values():
            tensor.copy_(before)


class EmulatedGraphs:
    """See GraphMaker."""

    def __init__(self) -> None:
        self.pool: dict[int, Tensor] = {}  # the memory that captures have allocated, by address
        self.records: Counter[int] = Counter()  # how many tensors the records have of each memory
        self.num_captures = 0
        self.num_operations = 0  # of all replays
        self._seeds: EmulatedSeeds | None = None
        self.recording: _Recording | None = None  # the capture that runs

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.pool = {}
        self.records.clear()
        capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
        try:
            with mock.patch("torch.get_rng_state", _refuse_state), capturing:
                yield
        finally:
            self.poison()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        state = torch.default_generator.get_state()
        self.recording = recording = _Recording(self)
        if self._seeds is not None:
            self._seeds.recording = recording
        try:
            with recording:
                function()
        finally:
            self.recording = None
            with torch.no_grad():
                recording.undo()
            torch.default_generator.set_state(state)
        return lambda: self._replay(recording.operations)

    def seeds(self, count: int) -> EmulatedSeeds:
        self._seeds = EmulatedSeeds(count)
        return self._seeds

    def poison(self) -> None:
        """Fill the pool with NaN and the like."""
        with torch.no_grad():
            for tensor in self.pool.values():
                size = tensor.untyped_storage().nbytes() // tensor.itemsize
                tensor.as_strided((size,), (1,), 0).fill_(_extreme(tensor.dtype))

    def held(self) -> int:
        """How many pieces of the pool's memory are in use by anything but the records."""
        count = 0
        for address, tensor in self.pool.items():
            storage = tensor.untyped_storage()  # one reference itself
            count += torch._C._storage_Use_Count(storage._cdata) > self.records[address] + 1
        return count

    def _replay(self, operations: list[Callable[[], None]]) -> None:
        self.num_operations += len(operations)
        with torch.no_grad():
            for each in operations:
                each()


class EmulatedSeeds:
    """See Seeds."""

    def __init__(self, count: int) -> None:
        self._seeds = [0] * count
        self.recording: _Recording | None = None

    def use(self, number: int) -> None:
        assert self.recording is not None
        self.recording.operations.append(lambda: torch.default_generator.manual_seed(self._seeds[number]))

    def restore(self) -> None:
        self.recording = None

    def set(self, seeds: list[int]) -> None:
        self._seeds = seeds


class RecordedLink:
    """A process group of two ranks whose sends and receives become part of a capture, as NCCL's do.

    Outside of captures it is the group itself. Inside, nothing is sent; each replay sends and receives.
    """

    def __init__(self, group: Any, maker: EmulatedGraphs) -> None:
        self._group, self._maker = group, maker

    def send(self, *arguments: Any) -> Any:
        return self._start(self._group.send, *arguments)

    def recv(self, *arguments: Any) -> Any:
        return self._start(self._group.recv, *arguments)

    def _start(self, call: Callable[..., Any], tensors: list[Tensor], peer: int, tag: int) -> Any:
        recording = self._maker.recording
        if recording is None:
            return call(tensors, peer, tag)
        works: list[Any] = []
        recording.operations.append(lambda: works.append(call([_alias(each) for each in tensors], peer, tag)))
        return SimpleNamespace(wait=lambda: recording.operations.append(lambda: works.pop().wait()))


def record_links(executor: Any, maker: EmulatedGraphs) -> None:
    """Let the executor's links take part in captures."""
    for box in executor._boxes():
        box.group = RecordedLink(box.group, maker)


def _refuse_state(*_: Any) -> Any:
    raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")


def _alias(value: Any) -> Any:
    """The same memory without a graph, so that a record keeps no autograd graph alive."""
    return value.detach() if isinstance(value, Tensor) else value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(made: Any) -> list[Any]:
    return tree_leaves(made)


def _extreme(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
