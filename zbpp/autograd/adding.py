"""How W adds to a gradient: products, products per expert, and rows of an embedding.

A gradient may be wider than what it is computed from: a float32 `main_grad` beside 16-bit x and dy. A product
is then summed in float32 and added without being rounded to 16 bits on the way.

                                        same dtype     float32 += product of 16-bit factors
    a GPU, torch with addmm(out_dtype)  addmm_         one call of addmm or baddbmm, no temporary
    a GPU, an older torch               addmm_         mm or bmm with out_dtype in parts, then an addition
    a CPU                               addmm_         the factors are cast in parts

`has_kernel` asks torch for the operation, not for its version. NOT RUN ON A GPU YET.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

_WIDENED = 2**26  # bytes of float32 numbers
_HALVES = (torch.bfloat16, torch.float16)


def add_or_copy(target: Tensor, gradient: Tensor, fresh: bool) -> None:
    """Add to the target, for rules that have to compute the gradient in a tensor of its own."""
    if fresh:
        target.copy_(gradient)
    else:
        target.add_(gradient)


# ---- Products


def add_product(target: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """target += left @ right, of matrices or of batches of matrices."""
    if target.dtype != left.dtype:
        _add_widened(target, left, right, fresh)
    elif target.dim() == 3:
        target.baddbmm_(left, right, beta=0 if fresh else 1)
    elif fresh:
        torch.mm(left, right, out=target)
    else:
        target.addmm_(left, right)


def _add_widened(target: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """Add a product to a target that is wider than the factors; temporaries stay small."""
    batched, dtype = target.dim() == 3, target.dtype
    add: Any = torch.baddbmm if batched else torch.addmm
    product: Any = torch.bmm if batched else torch.mm
    device = left.device.type if left.dtype in _HALVES and dtype == torch.float32 else "none"
    if has_kernel(f"{add.__name__}.dtype_out", device):
        add(target, left, right, beta=0 if fresh else 1, out_dtype=dtype, out=target)
    elif has_kernel(f"{product.__name__}.dtype", device):
        for part, some, factor in _parts(_rows_of(target), target, left, right):
            add_or_copy(part, product(some, factor, out_dtype=dtype), fresh)
    else:
        for part, some, factor in _parts(_rows_of(left), target, left, right.to(dtype)):
            add_product(part, some.to(dtype), factor, fresh)


def _parts(rows: int, target: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(target, left, right) in parts of `rows` rows. The right factor is cut in a batch only."""
    factors = right.split(rows) if target.dim() == 3 else repeat(right)
    return zip(target.split(rows), left.split(rows), factors, strict=False)


@functools.cache
def has_kernel(operation: str, device: str) -> bool:
    """Whether this torch has an aten operation ("mm.dtype") with a kernel for a type of device."""
    try:
        found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", device.upper())
    except RuntimeError:  # no such operation, or no such device
        return False
    return found


def _rows_of(factor: Tensor) -> int:
    """How many rows of a factor, or of a product, are cast to float32 at a time."""
    return max(1, _WIDENED // max(1, 4 * math.prod(factor.shape[1:])))


def add_grouped_product(target: Tensor, x: Tensor, dy: Tensor, ends: Tensor, fresh: bool) -> None:
    """target[e] += x[rows of expert e].T @ dy[the same rows]. ends: int32 [experts], where the rows end.

    The device needs no number from the host. torch's kernel writes the dtype of its factors: beside a float32
    target the product of a microbatch is rounded once, as in torch's own backward.
    """
    gradient = torch._grouped_mm(x.t(), dy, offs=ends)
    if _may_fill_empty_groups(x.device):
        no_rows = ends.diff(prepend=ends.new_zeros(1)) == 0
        gradient.masked_fill_(no_rows[:, None, None], 0)
    add_or_copy(target, gradient, fresh)


def _may_fill_empty_groups(device: torch.device) -> bool:
    """Whether grouped_mm may write numbers for an expert without rows: on Blackwell, pytorch #172439."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


# ---- Rows of an embedding


def add_rows(target: Tensor, tokens: Tensor, rows: Tensor, padding: int = -1) -> None:
    """target[tokens[i]] += rows[i]; the row of the padding token gets nothing. No temporary of target's size.

    target [V, H], tokens [...] below V, rows [..., H]. Where a sum of many terms would be rounded at each one
    (16 bits), or have no fixed order (a GPU), the rows of equal tokens are summed first, by torch's backward
    of an embedding whose words are the tokens that there are. It takes 8 bytes for each number of `rows`.
    """
    tokens, rows = tokens.reshape(-1), rows.reshape(-1, rows.shape[-1])
    if 0 <= padding < len(target):
        rows = torch.where((tokens == padding).unsqueeze(-1), 0, rows)
    if target.device.type != "cpu" or target.dtype in _HALVES:
        tokens, rows = _sums_per_token(tokens, rows, target.dtype)
    target.index_add_(0, tokens, rows.to(target.dtype))


def _sums_per_token(tokens: Tensor, rows: Tensor, wanted: torch.dtype) -> tuple[Tensor, Tensor]:
    """(token of each sum, the sum of the token's rows in their order); unused sums are 0, of token 0."""
    if rows.device.type == "cpu":  # there the sums have the dtype of the rows; on a GPU they are wider
        wanted = torch.promote_types(wanted, torch.float32)
    ordered, order = tokens.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    place = is_first.cumsum(0) - 1  # in the order of tokens
    places = torch.empty_like(place).scatter_(0, order, place)  # in the order of rows
    found = torch.zeros_like(ordered).scatter_(0, place, ordered)
    sums = torch.ops.aten.embedding_dense_backward(rows.to(wanted), places, len(tokens), -1, False)
    return found, sums
