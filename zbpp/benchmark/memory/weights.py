"""Weight offload measured: a model of more than three times the budget trains, and what a step copies.

One process, one rank, 4 microbatches of two rows through 10 linear layers in float32, under SGD. The host is
a folder of files, so that the live bytes are the device's alone. Copies on a CPU say nothing about a GPU's
times, so bytes and copies are counted, not timed.
"""

from __future__ import annotations

import tempfile
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zbpp.runtime import Pipeline
from zbpp.runtime.memory import live_bytes
from zbpp.runtime.weight_buffers import FileHost
from zbpp.runtime.weight_offload import OffloadedWeights

_CPU = torch.device("cpu")
_NUM_LAYERS, _SIZE, _NUM_MICROBATCHES, _NUM_STEPS = 10, 256, 4, 3
_LAYER = 4 * (_SIZE * _SIZE + _SIZE)
_BUDGET = 3 * _LAYER


class _Found(NamedTuple):
    losses: list[float]
    live: int  # the most live bytes, the weights included
    copies: float  # of a block's weights to the device, per step


def rows() -> list[tuple[str, str]]:
    """(what, figure) of each line."""
    without = _trained(None)
    offloaded = _trained(_BUDGET)
    larger = _trained(_NUM_LAYERS * _LAYER + _LAYER)
    num_equal = sum(map(float.__eq__, without.losses, offloaded.losses))
    share = f"{_NUM_LAYERS * _LAYER / _BUDGET:.2f} times the budget"
    name = f"{_NUM_LAYERS} layers"
    return [
        (f"{name}: bytes of all weights", f"{_NUM_LAYERS * _LAYER:,} ({share} of {_BUDGET:,})"),
        ("losses equal to the last bit", f"{num_equal} of {len(without.losses)}"),
        ("most live bytes: weights, gradients, activations; without", f"{without.live:,}"),
        ("most live bytes on the device, offloaded", _share(offloaded, without)),
        ("most live bytes on the device, budget for all weights", _share(larger, without)),
        ("copies of a layer's weights per step", f"{offloaded.copies:g}"),
        ("copies of a layer's weights per step, budget for all weights", f"{larger.copies:g}"),
    ]


def _share(found: _Found, without: _Found) -> str:
    return f"{found.live:,} ({found.live / without.live:.0%}; {found.live / _BUDGET:.2f} times the budget)"


def _trained(budget: int | None) -> _Found:
    """Train for some steps. budget: bytes of weights on the device; None: all weights stay there."""
    torch.manual_seed(0)
    layers = [nn.Linear(_SIZE, _SIZE) for _ in range(_NUM_LAYERS)]
    stages: dict[int, nn.Module] = {0: nn.Sequential(*layers)}
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        weights, made_before, copies = None, _NUM_LAYERS * _LAYER, 0
        if budget is not None:
            weights = OffloadedWeights(stages, _CPU, host=FileHost(folder), budget=budget)
            made_before = sum(each.nbytes for each in weights.on_device())
        level = live_bytes(lambda: losses.extend(_losses(stages)), _CPU).highest
        if weights is not None:
            copies = weights.num_copies
    return _Found(losses, level + made_before, copies / _NUM_STEPS)


def _losses(stages: dict[int, nn.Module]) -> list[float]:
    """Train for some steps."""
    found: list[float] = []
    x = torch.randn(2 * _NUM_MICROBATCHES, _SIZE)
    with Pipeline(stages, "zb_h1", F.mse_loss, num_microbatches=_NUM_MICROBATCHES) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            found.extend(each.item() for each in pipeline.step(x, target=x))
            optimizer.step()
    return found


if __name__ == "__main__":
    for what, figure in rows():
        print(f"{what}: {figure}")
