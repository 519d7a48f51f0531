"""The stages that are measured, their inputs, and one microbatch on them in three phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.benchmark.split.contestants import Contestant
from zbpp.models.llama import Llama


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes, and the number of rounds in which times are taken.

    hidden, batch, time (tokens of a row), blocks: of the stages for memory and compute. tiny: the hidden size
    of the stages for host time, which have `depths` blocks.
    """

    device: str = "cpu"
    dtype: str = "float32"
    hidden: int = 512
    batch: int = 4
    time: int = 256
    blocks: int = 4
    tiny: int = 16
    depths: tuple[int, ...] = (1, 8, 32)
    rounds: int = 15
    compute_rounds: int = 15


def llama_stage(blocks: int, settings: Settings, hidden: int | None = None) -> nn.Sequential:
    """Blocks from the middle of a Llama, whose parameters have a .grad. hidden: None for settings.tiny."""
    hidden = settings.tiny if hidden is None else hidden
    model = Llama(
        num_layers=blocks + 2,
        layers_per_stage=(1, blocks, 1),
        hidden_size=hidden,
        num_heads=max(1, hidden // 64),
        intermediate_size=None if hidden >= 64 else hidden,
        sequence_length=settings.time,
    )
    stage = model.build_stage(1, 3).to(settings.device, getattr(torch, settings.dtype))
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage


def x_and_dy(stage: nn.Module, batch: int, time: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """An input of the stage and a gradient of its output, the same in every call."""
    size = next(parameter for parameter in stage.parameters() if parameter.dim() == 2).shape[1]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, batch, time, size, generator=generator)
    x, dy = drawn.to(settings.device, getattr(torch, settings.dtype)).unbind()
    return x, dy


class Microbatch:
    """One microbatch of a contestant on a stage: F, B and W, to be called in this order."""

    def __init__(self, contestant: Contestant, stage: nn.Module, x: Tensor, dy: Tensor) -> None:
        self.contestant, self.stage, self.x, self.dy = contestant, stage, x, dy
        self._forward: tuple[Tensor, Tensor] | None = None  # between F and B: input and output
        self._kept: Any = None  # between B and W

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        return {"F": self.f, "B": self.b, "W": self.w}

    def f(self) -> None:
        arrived = self.contestant.enter(self.x.clone())  # a copy: each microbatch has an input of its own
        self._forward = arrived, self.contestant.f(self.stage, arrived)

    def b(self) -> None:
        assert self._forward is not None
        (arrived, y), self._forward = self._forward, None
        self._kept = self.contestant.b(self.stage, arrived, y, self.dy.clone())

    def w(self) -> None:
        kept, self._kept = self._kept, None
        self.contestant.w(self.stage, kept)


def step(contestant: Contestant, stage: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Run one microbatch."""
    for run in Microbatch(contestant, stage, x, dy).phases.values():
        run()
