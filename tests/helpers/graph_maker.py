"""CUDA graphs on the CPU: captures record every aten operation, replays run the record again.

As on CUDA
- a capture has no effect: what it changes gets its values back, and so does the generator; what it makes was
  never computed;
- a replay computes into the memory of the capture, by addresses: a graph keeps no tensor alive;
- a replay runs no other Python;
- operations whose result the host reads (.item(), nonzero) raise an error inside a capture;
- random numbers of a replay come from the seed that the generator has when the replay starts.

`poison` fills all memory that captures have allocated, as if it had been used for something else: what a
replay doesn't compute itself must lie outside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        if function is _aten.lift_fresh.default:  # a constant of forward, which a GPU would refuse to copy
            self._maker.constants.append(made)
        self._record(function, args, kwargs, made)
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
                whole = tensor.detach()
                whole = whole.as_strided((whole.untyped_storage().nbytes() // whole.itemsize,), (1,), 0)
                self._before[address] = whole, whole.clone()

    def _record(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        outputs = [each if isinstance(each, Tensor) else None for each in _flat(made)]
        fresh = [None if each is None or _address(each) in given else each for each in outputs]
        for each in fresh:
            if each is not None and each.untyped_storage().nbytes():
                self._maker.pool[_address(each)] = each.detach()
        if not function._schema.is_mutable and not any(each is not None for each in fresh):
            return  # a view: it is where it was
        args, kwargs, fresh = tree_map(_by_address, (args, kwargs, fresh))

        def again() -> None:
            results = _flat(function(*args, **kwargs))
            for place, result in zip(fresh, results, strict=True):
                if place is not None:
                    place.copy_(result)

        self.operations.append(again)

    def undo(self) -> None:
        """Give all that the capture has changed its values back."""
        for tensor, before in self._before.values():
            tensor.copy_(before)
        self._before.clear()


class EmulatedGraphs:
    """See GraphMaker."""

    def __init__(self) -> None:
        self.pool: dict[int, Tensor] = {}  # the memory that captures have allocated, by address
        self.constants: list[Tensor] = []
        self.num_captures = 0

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.pool = {}
        capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
        try:
            with mock.patch("torch.get_rng_state", _refuse_state), capturing:
                yield
        finally:
            self.poison()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        state = torch.default_generator.get_state()
        recording = _Recording(self)
        try:
            with recording:
                function()
        finally:
            with torch.no_grad():
                recording.undo()
            torch.default_generator.set_state(state)
        operations = recording.operations
        return lambda: self._replay(operations)

    def poison(self) -> None:
        """Fill the pool with NaN and the like."""
        with torch.no_grad():
            for tensor in self.pool.values():
                size = tensor.untyped_storage().nbytes() // tensor.itemsize
                tensor.as_strided((size,), (1,), 0).fill_(_extreme(tensor.dtype))

    def held(self) -> int:
        """How many pieces of the pool's memory are in use by anything but the pool."""
        storages = [each.untyped_storage() for each in self.pool.values()]  # two references
        return sum(torch._C._storage_Use_Count(each._cdata) > 2 for each in storages)

    def _replay(self, operations: list[Callable[[], None]]) -> None:
        with torch.no_grad():
            for each in operations:
                each()


def _refuse_state(*_: Any) -> Any:
    raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")


def _by_address(value: Any) -> Any:
    """A tensor over the same memory that does not keep it alive, and has no graph."""
    if not isinstance(value, Tensor) or not (size := value.untyped_storage().nbytes()):
        return value
    memory = (ctypes.c_byte * size).from_address(_address(value))
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(made: Any) -> list[Any]:
    return tree_leaves(made)


def _extreme(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
