"""Section memory: live bytes during and after F, B and W."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.autograd import explain
from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.benchmark.split.contestants import Contestant
from zbpp.benchmark.split.report import Line
from zbpp.benchmark.split.stages import Microbatch, Settings, llama_stage, step, x_and_dy
from zbpp.runtime.measure.memory import Level, live_bytes

_MIB = 2**20


def levels(phases: Mapping[str, Callable[[], None]], device: str) -> dict[str, Level]:
    """Run the phases. Returns the live bytes of each phase, over those before the first."""
    found: dict[str, Level] = {}
    before = 0
    with without_garbage_collection():
        for phase, run in phases.items():
            highest, after = live_bytes(run, torch.device(device))
            found[phase] = Level(before + highest, before + after)
            before += after
    return found


def memory(contestants: Mapping[str, Contestant], settings: Settings) -> Iterator[Line]:
    stage = llama_stage(settings.blocks, settings, settings.hidden)
    x, dy = x_and_dy(stage, settings.batch, settings.time, settings)
    found = {}
    for name, contestant in contestants.items():
        step(contestant, stage, x, dy)  # allocates what stays from then on
        found[name] = levels(Microbatch(contestant, stage, x, dy).phases, settings.device)

    def line(figure: str, value: Callable[[dict[str, Level]], float], **how: Any) -> Line:
        values = {name: value(each) for name, each in found.items()}
        return Line(section="memory", figure=figure, values=values, **how)

    plain = found["plain"]["B"].highest
    yield line("after F, MiB", lambda each: each["F"].after / _MIB, form=".1f")
    yield line("highest during B, MiB", lambda each: each["B"].highest / _MIB, form=".1f")
    yield line("after B, MiB", lambda each: each["B"].after / _MIB, form=".1f")
    yield line("after B / after F", lambda each: each["B"].after / each["F"].after, limit=0.85)
    yield line(
        "highest during B above plain's, MiB",
        lambda each: (each["B"].highest - plain) / _MIB,
        form=".1f",
        limit=_dy_bytes(stage, x) / _MIB,
        note=" (held dy)",
    )
    yield line("left after W, bytes", lambda each: each["W"].after, form=".0f", limit=0)


def _dy_bytes(stage: nn.Module, x: Tensor) -> int:
    """Bytes of the gradients that zbpp holds between B and W."""
    arrived = x.clone().requires_grad_()
    return explain(stage(arrived), arrived).dy_bytes
