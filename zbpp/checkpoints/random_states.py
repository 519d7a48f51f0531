"""The states of a process's random numbers: Python's, numpy's and torch's.

A pipeline needs none of them (see zbpp/seeding.py): they are for the code around it.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().tolist()).hex() if _has_cuda() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from these states."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] is not None and _has_cuda():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
