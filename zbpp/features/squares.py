"""Squared norms of gradients, in float64. The norm over all ranks is the square root of their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zbpp.runtime.processes.dtensors import local_of

_CHUNK = 2**22  # numbers of a gradient that are cast to float64 at a time, 32 MiB


def squares_of(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of this process's part of each gradient, float64 [gradients] on the device.

    All gradients of one dtype take one call. On a GPU the call's kernel casts number by number; elsewhere
    torch casts a whole tensor first, so a gradient goes in chunks. (Sums in float32 miss the norm of 2**22
    16-bit numbers by 1e-4 on a CPU.)
    """
    together: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for place, gradient in enumerate(gradients):
        for chunk in _chunks(gradient):
            together.setdefault((chunk.device, chunk.dtype), []).append((place, chunk))
    found: list[list[Tensor]] = [[] for _ in gradients]
    for some in together.values():
        norms = torch._foreach_norm([chunk for _, chunk in some], 2, dtype=torch.float64)
        squares = torch.stack(list(norms)).square().to(device)
        for (place, _), square in zip(some, squares.unbind(), strict=True):
            found[place].append(square)
    zero = torch.zeros((), dtype=torch.float64, device=device)  # of an empty gradient
    sums = [torch.stack(each).sum() if len(each) > 1 else (each or [zero])[0] for each in found]
    return torch.stack(sums) if sums else zero.new_empty(0)


def _chunks(gradient: Tensor) -> Iterator[Tensor]:
    """This process's part of a gradient in pieces; of a sparse gradient its values, equal indices summed."""
    values = gradient.coalesce().values() if gradient.is_sparse else local_of(gradient)
    real = torch.view_as_real(values) if values.is_complex() else values
    # In the order of memory, a view of any dense tensor.
    order = sorted(range(real.dim()), key=real.stride, reverse=True)
    flat = real.detach().permute(order).reshape(-1)
    return (each for each in flat.split(_CHUNK) if each.numel())
