"""All that zbpp asks of a device, and of the backends that carry tensors between processes.

A device is the CPU, or a device of the accelerator that this torch has: CUDA, ROCm (which torch calls cuda,
too), or any other that torch.accelerator knows. No other file says which accelerator there is, except for
what is CUDA's own: graphs, settings of its allocator and of its driver, and kernels that a GPU has or lacks
(tests/test_floor_plan.py lists these files). Streams and events are in streams.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether the device belongs to the accelerator of this torch; the CPU does not."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def accelerator_name() -> str:
    """What torch calls the accelerator of this machine: "cuda", "xpu", ...; "" without a device of it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "" if accelerator is None else accelerator.type


def num_devices(name: str) -> int:
    """How many devices of this name the process sees; 0 for any other name than the accelerator's."""
    return torch.accelerator.device_count() if name == accelerator_name() else 0


def whole(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" is the current one of the calling thread."""
    device = torch.device(device)
    index: Any = device.index  # None without one, which torch's types don't say
    if index is None and is_accelerator(device):
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def current_device() -> torch.device:
    """The calling thread's device of the accelerator if the process has used it, else the CPU."""
    name = accelerator_name()
    is_used = getattr(torch.get_device_module(name or "cpu"), "is_initialized", lambda: False)()
    return whole(name if name and is_used else "cpu")


def make_current(device: torch.device) -> None:
    """Let the calling thread use this device where none is named.

    A thread begins with device 0. What it does there first takes a few hundred MB of that device.
    """
    if is_accelerator(device):
        torch.accelerator.set_device_index(whole(device))


def synchronize(device: torch.device) -> None:
    """Let the host wait for all that the device was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def name_of(device: torch.device) -> str:
    """The maker's name of an accelerator's device, such as "NVIDIA H100 80GB HBM3"."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def empty_host_cache() -> None:
    """Give the machine back the freed memory that pinned tensors had: torch keeps it for later ones."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 may lack it
    if empty is not None and current_device().type != "cpu":
        empty()


# ---- Memory, as the device's allocator counts it; of the CPU nothing is counted here


def allocated_bytes(device: torch.device) -> int:
    """The bytes of all tensors on an accelerator's device."""
    return torch.accelerator.memory_allocated(device)


def highest_allocated_bytes(device: torch.device) -> int:
    """The most bytes that tensors had at a time, since the process began or since `forget_highest`."""
    return torch.accelerator.max_memory_allocated(device)


def forget_highest(device: torch.device) -> None:
    """Begin `highest_allocated_bytes` anew."""
    torch.accelerator.reset_peak_memory_stats(device)


def free_bytes(device: torch.device) -> int:
    """The bytes of an accelerator's device that no process uses, as its driver counts them."""
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)


def num_allocation_retries(device: torch.device) -> int:
    """How often the device was full, so that its allocator gave memory back and tried again."""
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))


# ---- Random numbers


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and, if the device is an accelerator's, the device's too."""
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        with torch.accelerator.device_index(whole(device).index):
            torch.get_device_module(device).manual_seed(seed)


def devices_with_generators(devices: Iterable[torch.device]) -> set[torch.device]:
    """Those that are an accelerator's, and the thread's current one, if the process has used the accelerator.

    Whatever draws random numbers without a tensor draws them on the current device.
    """
    return set(filter(is_accelerator, {*devices, current_device()}))


def generator_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """{device: the state of its generator} of those that are an accelerator's."""
    return {
        each: torch.get_device_module(each).get_rng_state(each) for each in devices if is_accelerator(each)
    }


def set_generator_states(states: dict[torch.device, Tensor]) -> None:
    """Go on with the random numbers that `generator_states` has found."""
    for device, state in states.items():
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def restored_generators(*devices: torch.device) -> Iterator[None]:
    """Restore the random numbers of the CPU, and of these devices, at the end."""
    states, cpu_state = generator_states(devices), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        set_generator_states(states)


# ---- Backends of torch.distributed


class Backend(NamedTuple):
    """What a started receive costs, and how a group of this backend is asked for urgent messages.

    occupies_device: a receive that has started is work of the device, which ends when the message is there.
    Whatever waits for the whole device meanwhile waits for the other rank, too. False: only the host knows of
    the receive, and messages are in host memory.
    options: torch's class of process groups that has Options with priorities; "": no such options.
    """

    occupies_device: bool
    options: str = ""


_BACKENDS = {
    "gloo": Backend(occupies_device=False),
    "nccl": Backend(occupies_device=True, options="ProcessGroupNCCL"),
    "xccl": Backend(occupies_device=True, options="ProcessGroupXCCL"),
    "hccl": Backend(occupies_device=True),
}
_UNKNOWN = Backend(occupies_device=True)  # the careful guess
_MAX_CTAS = 8  # blocks of a kernel that sends or receives; NCCL's own number is 16 to 32 over NVLink


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that carries the group's tensors of this device: "gloo", "nccl", ...; "" without one."""
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "")


def carried(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor if the group's backend takes it from where it is; else a copy from where the backend does.

    NCCL takes no tensor in host memory: no number that was made there, and no weight that is kept there.
    """
    return tensor if backend_of(group, tensor.device) else tensor.to(device_for_messages(group))


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> None:
    """Sum a tensor, in place, over the group's processes. Collective."""
    sums = carried(values, group)
    dist.all_reduce(sums, group=group)
    if sums is not values:
        values.copy_(sums)


def occupies_device(backend: str) -> bool:
    """Whether a receive that has started occupies the device until its message is there, see Backend."""
    return _BACKENDS.get(backend, _UNKNOWN).occupies_device


def urgent_options(backend: str, timeout: timedelta) -> Any:
    """The options of a group whose messages are urgent; None for a backend that knows no priorities.

    The backend then takes its streams from those of high priority: a message's kernel gets the next
    multiprocessor that is free, before the rest of a large product. A kernel that waits for the other rank
    occupies its multiprocessors: max_ctas limits their number. torch warns if the options' timeout isn't the
    group's.
    """
    known: Any = getattr(dist, _BACKENDS.get(backend, _UNKNOWN).options, None)
    if not hasattr(known, "Options"):
        return None
    options = known.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    if hasattr(options, "config"):
        options.config.max_ctas = _MAX_CTAS
    return options


def device_for_messages(group: dist.ProcessGroup | None) -> torch.device:
    """This thread's device of the accelerator if the group's backend sends from there, else the CPU."""
    device = torch.device(accelerator_name() or "cpu")
    backend = backend_of(group, device) if dist.is_initialized() else ""
    sends_from_there = device.type != "cpu" and backend != "" and occupies_device(backend)
    return whole(device) if sends_from_there else torch.device("cpu")
