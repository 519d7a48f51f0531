"""The library's models in float64 throughout, so that gradients can be compared to 1e-12."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F


@contextmanager
def library_in_float64() -> Iterator[None]:
    """What the library casts to float32 (norms, softmax, routers) it casts to float64."""
    to, softmax = torch.Tensor.to, F.softmax

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def wide_to(tensor: Any, *args: Any, **options: Any) -> Any:
        return to(tensor, *map(wide, args), **{name: wide(value) for name, value in options.items()})

    def wide_softmax(*args: Any, dtype: Any = None, **rest: Any) -> Any:
        return softmax(*args, dtype=wide(dtype), **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.Tensor, "to", wide_to)
        patch.setattr(F, "softmax", wide_softmax)
        yield
