"""The backends "nccl" and "hccl" of the emulated device: NCCL's rules over the same memory as the CPU's.

The rules are those of helpers/nccl_rules.py. Two come from devices: no tensor of the CPU, and in one
communicator one device for each rank, no device twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from accelerator.load import NAME, library
from helpers.nccl_rules import StrictGroup, wait_for_device

_METHODS = (
    *("send", "recv", "broadcast", "allreduce", "allreduce_coalesced", "reduce", "scatter", "alltoall_base"),
    *("gather", "allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class _Config:
    """What NCCL's options call `config`: any attribute may be set."""


class Options(torch._C._distributed_c10d.Backend.Options):
    """As ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False, backend: str = "nccl") -> None:
        super().__init__(backend, timedelta(seconds=600))
        self.is_high_priority_stream, self.config = is_high_priority_stream, _Config()
        self.group_name, self.global_ranks_in_group = "", []


class DeviceGroup(StrictGroup):
    """A group of the device's processes. with_cpu: gloo serves the CPU's tensors: "cpu:gloo,cuda:nccl"."""

    Options = Options
    supports_splitting = False
    with_cpu = False  # of the group that torch is making

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        self._options = options
        self._device_of: dict[str, int] = {}  # by communicator
        self._known: set[str] = set()  # communicators whose ranks have told their devices
        self._cpu = None
        if self.with_cpu:
            prefixed = dist.PrefixStore("cpu", store)
            self._cpu = dist.ProcessGroupGloo(prefixed, rank, size, options._timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)] + ([torch.device("cpu")] if self._cpu else [])

    @property
    def options(self) -> Any:
        return self._options

    def getBackendName(self) -> str:
        return {"cuda": "nccl", "npu": "hccl"}[NAME]

    def _get_backend(self, device: torch.device) -> Any:
        return self._cpu if self._cpu is not None and device.type == "cpu" else self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def perform_nocolor_split(self, device: torch.device) -> None:
        pass

    def barrier(self, opts: Any = None) -> dist.Work:
        by_rank = dist.get_rank() % library.device_count if dist.is_initialized() else 0
        self._use(next(iter(self._device_of.values()), by_rank), None)
        return super().barrier(opts)

    def _call(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """A method of StrictGroup's on the memory of the device's tensors."""
        method = getattr(StrictGroup, name)
        tensors = [*_tensors((args, [*given.values()]))]
        if any(_is_alias(each) for each in tensors):
            return method(self, *args, **given)  # one collective calls another one
        devices = {each.device for each in tensors}
        if devices == {torch.device("cpu")}:
            if self._cpu is None:
                raise RuntimeError("No backend type associated with device type cpu")
            return getattr(self._cpu, name)(*args, **given)
        if len(devices) > 1:
            raise RuntimeError(f"tensors of several devices: {devices}")
        for device in devices:
            self._use(device.index, args[1] if name in ("send", "recv") else None)
        return method(self, *map(_aliases, args), **{key: _aliases(value) for key, value in given.items()})

    def _use(self, device: int, peer: int | None) -> None:
        """Raise RuntimeError unless each rank of the communicator has one device, and none has another's."""
        ranks = sorted(range(self._num_places) if peer is None else [self._place, peer])
        name = f"device {ranks}"
        if self._device_of.setdefault(name, device) != device:
            raise RuntimeError(f"a communicator is used on another device than before: {device}")
        if name in self._known:
            return
        self._known.add(name)
        self._store.set(f"{name} {self._place}", str(device))
        found = [self._store.get(f"{name} {rank}").decode() for rank in ranks]
        if len({*found}) < len(found):
            text = f"Duplicate GPU detected: ranks {ranks} are on devices {found}"
            raise RuntimeError(f"ncclInvalidUsage: {text}")


def install() -> None:
    """Let torch.distributed know the device's backend, as a build with it does."""
    for name in _METHODS:
        setattr(DeviceGroup, name, _method(name))
    original = c10d._new_process_group_helper

    def new_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **given: Any) -> Any:
        DeviceGroup.with_cpu = "cpu:gloo" in str(c10d.BackendConfig(dist.Backend(str(backend))))
        return original(size, rank, ranks, backend, *args, **given)

    c10d._new_process_group_helper = new_group
    if NAME == "cuda":
        c10d._NCCL_AVAILABLE = True
        c10d.default_pg_nccl_timeout = timedelta(minutes=10)
        c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = DeviceGroup
        dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    else:
        dist.Backend.register_backend("hccl", _make_hccl, extended_api=True, devices=[NAME])
    _let_synchronize_wait()


def _make_hccl(told: Any, options: Any) -> DeviceGroup:
    if options is None:
        options = Options(backend="hccl")
        options._timeout = told.timeout
    return DeviceGroup(told.store, told.group_rank, told.group_size, options)


def _let_synchronize_wait() -> None:
    """A message that has started is a kernel of the device, which synchronize waits for."""
    module = torch.get_device_module(NAME)
    inner, of_any_device = module.synchronize, torch.accelerator.synchronize

    def synchronize(device: Any = None) -> None:
        wait_for_device()
        inner(device)

    def synchronize_any(device: Any = None, /) -> None:
        wait_for_device()
        of_any_device(device)

    module.synchronize, torch.accelerator.synchronize = synchronize, synchronize_any


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **given: self._call(name, args, given)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _is_alias(tensor: Tensor) -> bool:
    return hasattr(tensor, "_is_alias_of_device")


def _aliases(value: Any) -> Any:
    """The same with each tensor of the device seen as one of the CPU."""
    if isinstance(value, Tensor):
        alias = library.cpu_alias(value.detach())
        alias._is_alias_of_device = True
        return alias
    return [_aliases(each) for each in value] if isinstance(value, list | tuple) else value
