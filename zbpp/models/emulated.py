"""EMULATED stages, which sleep for given times instead of computing.

More ranks than cores can't compute at the same time, but they can sleep at the same time. So a schedule of
many ranks shows its true shape on a laptop. Reports with figures of such a model say that it is emulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.autograd.models.exchange import Exchange
from zbpp.models.layers import StagedModel, TokenwiseStage, check_positive, fan_in_std

Times = float | Sequence[float]
"""Milliseconds: one number for all layers, or one per layer."""


class Emulated(StagedModel):
    """EMULATED: each layer is one tiny linear that sleeps f ms in F, b ms in B and w ms in W.

    Autograd sees the input gradient and the weight gradient as separate work, as with a real layer; a whole
    backward sleeps b + w. So any runtime that splits the backward has a B and a W, torch's too. But torch's
    never splits stage 0: its B sleeps 0 ms and its W sleeps b + w (a test counts the sleeps).
    exchange: ms of f, and of b, in which a layer waits for an emulated exchange of experts' rows, as a
    mixture-of-experts layer does: W's of earlier microbatches may run meanwhile (zbpp.OverlapExchange).
    A layer holds four times its input's memory from F until B, and twice that memory from B until W (input
    and output gradient). Layers are split over stages like a real model's, so schedules with one and with two
    stages per rank have the same work. Inputs, outputs and targets are float [batch, hidden_size].
    Raises ValueError for negative times, and for a list of another length than num_layers.
    """

    emulated = True

    def __init__(
        self,
        *,
        num_layers: int,
        f: Times,
        b: Times,
        w: Times,
        exchange: Times = 0.0,
        hidden_size: int = 8,
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        check_positive(num_layers=num_layers, hidden_size=hidden_size)
        given = {"f": f, "b": b, "w": w, "exchange": exchange}
        times = [per_layer(name, value, num_layers) for name, value in given.items()]
        for number, (f_ms, b_ms, _, exchange_ms) in enumerate(zip(*times, strict=True)):
            if exchange_ms > min(f_ms, b_ms):
                raise ValueError(
                    f"exchange={exchange_ms:g} is a part of f and of b, which are {f_ms:g} and {b_ms:g} in "
                    f"layer {number}: write f and b with the exchange in them"
                )
        super().__init__(
            layer=lambda number: SleepingLinear(hidden_size, *(each[number] for each in times)),
            num_layers=num_layers,
            layers_per_stage=layers_per_stage,
            std=fan_in_std,
            seed=seed,
            stage=TokenwiseStage,
        )

    def build_stage(self, index: int, num_stages: int) -> nn.Sequential:
        """See StagedModel."""
        stage = super().build_stage(index, num_stages)
        for layer in stage.children():
            if isinstance(layer, SleepingLinear):
                layer.sleep_in_w()  # the hook has to be on the final weight
        return stage

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean square error over all elements."""
        return F.mse_loss(output, target)


class SleepingLinear(nn.Module):
    """A linear layer without bias, [batch, hidden] in and out, that takes f, b and w milliseconds."""

    def __init__(self, hidden_size: int, f: float, b: float, w: float, exchange: float = 0.0) -> None:
        super().__init__()
        self.f, self.b, self.w = f - exchange, b - exchange, w
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.exchange: Exchange | None = None
        if exchange > 0:
            self.exchange = Exchange()
            self.exchange.transfer = lambda rows, send, receive: Timer(rows, exchange)

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.f)
        y = F.linear(x, self.weight)
        if self.exchange is not None:
            y = self.exchange(y, [len(y)], [len(y)])
        # The backward of the OUTPUT sleeps b: so stage 0 sleeps, too, though its input needs no gradient.
        slow: Tensor = SlowBackward.apply(y, self.b)  # type: ignore[no-untyped-call]  # torch's apply is untyped
        return slow

    def sleep_in_w(self) -> None:
        """From now on sleep w ms whenever the gradient of the weight is computed."""
        # A hook, not a Function on the weight: a real layer has no autograd node there.
        self.weight.register_hook(lambda grad: sleep(self.w))


class SlowBackward(torch.autograd.Function):
    """The identity, with a backward that sleeps. Until then it holds three times the memory of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, milliseconds: float) -> Tensor:
        """Return the memory of `x`, but no view of it for autograd: torch's split can't detach views."""
        ctx.milliseconds = milliseconds
        ctx.save_for_backward(x.new_empty(3, *x.shape))
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged, after a sleep."""
        sleep(ctx.milliseconds)
        return grads[0], None


class Timer:
    """An exchange that takes so many milliseconds from now on (see `Pending` in exchange.py)."""

    def __init__(self, rows: Tensor, milliseconds: float) -> None:
        self._rows, self._end = rows, time.perf_counter() + milliseconds / 1000

    def is_done(self) -> bool:
        """See Pending."""
        return time.perf_counter() >= self._end

    def wait(self) -> Tensor:
        """See Pending."""
        sleep(max(0.0, 1000 * (self._end - time.perf_counter())))
        return self._rows.clone()


def sleep(milliseconds: float) -> None:
    """Sleep without using the processor, which other ranks may need."""
    time.sleep(milliseconds / 1000)


def per_layer(name: str, times: Times, num_layers: int) -> list[float]:
    """One time per layer. Raises ValueError for a time out of range or a list of another length."""
    numbers = [float(times)] * num_layers if isinstance(times, int | float) else list(times)
    if len(numbers) != num_layers:
        raise ValueError(
            f"{name}={numbers} has {len(numbers)} times for {num_layers} layers: "
            f"write one number for all, or {num_layers} of them"
        )
    if not all(0 <= each < math.inf for each in numbers):  # NaN is neither
        raise ValueError(f"{name}={times} holds a negative or infinite time: write milliseconds, 0 or more")
    return numbers
