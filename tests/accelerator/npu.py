"""torch.npu: the module that a package beside torch gives for its device of PrivateUse1."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accelerator.load import NAME, library


def install() -> None:
    """Let torch know the device's module, and give tensors, modules and storages its methods."""
    sys.modules[f"torch.{NAME}"] = module = types.ModuleType(f"torch.{NAME}")
    for each in _FUNCTIONS:
        setattr(module, each.__name__, each)
    module.Stream, module.Event = torch.Stream, torch.Event
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return library.device_count


def current_device() -> int:
    return library.current_device()


def set_device(device: Any) -> None:
    library.exchange_device(_index(device))


def synchronize(device: Any = None) -> None:
    library.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """As torch.cuda.stream; torch's FSDP2 asks the device's module for it."""
    if stream is None:
        yield
        return
    with stream:
        yield


def get_device_name(device: Any = None) -> str:
    return f"{NAME} on the CPU"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    library.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for device in range(device_count()):
        library.default_generator(device).manual_seed(seed)


def initial_seed() -> int:
    return library.default_generator(current_device()).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return library.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    library.default_generator(_index(device)).set_state(state)


def memory_allocated(device: Any = None) -> int:
    return library.allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return library.peak(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    library.reset_peak(_index(device))


def empty_cache() -> None:
    pass


def _index(device: Any) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return library.current_device() if device is None else device


_FUNCTIONS = [each for each in list(globals().values()) if isinstance(each, types.FunctionType)]
_FUNCTIONS = [each for each in _FUNCTIONS if each not in (install, _index, contextmanager)]
