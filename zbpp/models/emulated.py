"""EMULATED stages: they sleep for given times instead of computing.

More ranks than cores can't compute at once, but they can sleep at once: so a schedule of many
ranks shows its true shape on a laptop. Whatever prints figures of it says that it is emulated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.models.layers import Blueprint, check_positive, fan_in_std

Times = float | Sequence[float]
"""Milliseconds: one number for all stages, or one per stage."""


class Emulated:
    """EMULATED: each stage sleeps f ms in F, b ms in B, w ms in W, around one tiny linear layer.

    Autograd sees input and weight gradients as separate work, as with a real layer; a whole
    backward sleeps b + w. float [batch, hidden_size] in, between stages, and out; the target too.
    Raises ValueError for negative times.
    """

    emulated = True

    def __init__(self, *, f: Times, b: Times, w: Times, hidden_size: int = 8, seed: int = 0) -> None:
        check_positive(hidden_size=hidden_size)
        self._times = {"f": f, "b": b, "w": w}
        for name, times in self._times.items():
            check_times(name, times)
        self._hidden_size = hidden_size
        self._seed = seed

    def build_stage(self, index: int, num_stages: int) -> nn.Sequential:
        """Stage `index` of `num_stages`. Raises ValueError if a list of times has another length."""
        f, b, w = (per_stage(name, times, num_stages) for name, times in self._times.items())
        blueprint = Blueprint(
            layer=lambda stage: SleepingLinear(self._hidden_size, f=f[stage], b=b[stage], w=w[stage]),
            num_layers=num_stages,
            std=fan_in_std,
            seed=self._seed,
        )
        return blueprint.build_stage(index, num_stages)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean square error over all elements."""
        return F.mse_loss(output, target)


class SleepingLinear(nn.Module):
    """A linear layer without bias, [batch, hidden] in and out, that takes f, b and w milliseconds."""

    def __init__(self, hidden_size: int, *, f: float, b: float, w: float) -> None:
        super().__init__()
        self.f, self.b, self.w = f, b, w
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.f)
        # w hangs on the weight alone, so it is slept when the weight's gradient is taken, and only then.
        # b hangs on the OUTPUT: stage 0 sleeps it too, though its input needs no gradient.
        y = F.linear(x, slow_backward(self.weight, self.w))
        return slow_backward(y, self.b)


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, milliseconds: float) -> Tensor:
        """`x` itself, as a view."""
        ctx.milliseconds = milliseconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient as it came, after a nap."""
        sleep(ctx.milliseconds)
        return grads[0], None


def slow_backward(x: Tensor, milliseconds: float) -> Tensor:
    """`x`; its gradient takes `milliseconds` to pass."""
    passed: Tensor = SlowBackward.apply(x, milliseconds)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return passed


def sleep(milliseconds: float) -> None:
    """Sleep without using the processor: the other ranks may need it."""
    time.sleep(milliseconds / 1000)


def check_times(name: str, times: Times) -> None:
    """Raises ValueError if any of `times` is negative."""
    if any(value < 0 for value in ([times] if isinstance(times, int | float) else times)):
        raise ValueError(f"{name}={times} holds a negative time: write milliseconds, 0 or more")


def per_stage(name: str, times: Times, num_stages: int) -> list[float]:
    """One time per stage. Raises ValueError if a list is given for another number of stages."""
    if isinstance(times, int | float):
        return [times] * num_stages
    if len(times) != num_stages:
        raise ValueError(
            f"{name}={list(times)} has {len(times)} times for {num_stages} stages: "
            f"write one number for all, or {num_stages} of them"
        )
    return list(times)
