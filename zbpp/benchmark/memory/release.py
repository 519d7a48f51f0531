"""Gradient release measured: equal losses, the most gradient bytes at a time, and memory beside activations.

One process, one rank, 8 microbatches of one row through 32 linear layers in float32, under torch-optimi's
AdamW. Activations are a thousandth of the weights, so the most live bytes are weights, gradients, states and
the optimizer's temporary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.memory import live_bytes

_NUM_LAYERS, _SIZE, _NUM_MICROBATCHES, _NUM_STEPS = 32, 256, 8, 4
_NUM_STAGES = 4
_RELEASES = ("off", "step", "accumulate")


class _Found(NamedTuple):
    losses: list[float]
    gradients: int  # the most bytes of `.grad` at a time
    live: int  # the most live bytes: weights, gradients, states, temporary tensors


def rows() -> list[tuple[str, str]]:
    """(what, figure) of each line."""
    found = {release: _measured(release) for release in _RELEASES}
    off = found["off"]
    largest = 4 * (_SIZE * _SIZE + _SIZE)
    num_equal = sum(map(float.__eq__, off.losses, found["step"].losses))
    table = [("losses of step equal to the last bit", f"{num_equal} of {len(off.losses)}")]
    for release, each in found.items():
        in_layers = f"{each.gradients / largest:.2f} of the largest layer's"
        table.append((f"peak gradient bytes, {release}", f"{each.gradients:,} ({in_layers})"))
    # Breadth first, a stage has done all its work before the stage before it begins its backward.
    breadth = {release: _peak_gradients(release, "looped_bfs", _NUM_STAGES) for release in ("off", "step")}
    share = f"{breadth['step']:,} ({breadth['step'] / breadth['off']:.2f} of off's)"
    table.append((f"peak gradient bytes, step, looped_bfs with {_NUM_STAGES} stages on the rank", share))
    for release, each in found.items():
        change = "" if release == "off" else f" ({each.live / off.live - 1:+.0%})"
        table.append((f"weights, gradients, AdamW's states in float32, {release}", f"{each.live:,}{change}"))
    return table


def _measured(release: str) -> _Found:
    losses: list[float] = []

    def run() -> None:
        losses[:] = _trained(release)

    live = live_bytes(run, torch.device("cpu")).highest
    return _Found(losses, _peak_gradients(release), live)


def _peak_gradients(release: str, schedule: str = "zb_h1", num_stages: int = 1) -> int:
    highest = 0

    def watch(pipeline: Pipeline) -> None:
        def see(_: Tensor) -> None:
            nonlocal highest
            present = [each.grad.nbytes for each in pipeline.parameters() if each.grad is not None]
            highest = max(highest, sum(present))

        for parameter in pipeline.parameters():
            parameter.register_post_accumulate_grad_hook(see)

    _trained(release, watch, schedule, num_stages)
    return highest


def _trained(
    release: str,
    watch: Callable[[Pipeline], None] | None = None,
    schedule: str = "zb_h1",
    num_stages: int = 1,
) -> list[float]:
    """The losses of a few steps."""
    from optimi import AdamW

    torch.manual_seed(0)
    layers = [torch.nn.Linear(_SIZE, _SIZE) for _ in range(_NUM_LAYERS)]
    timetable = plan(schedule, 1, _NUM_MICROBATCHES, stages_per_rank=num_stages)
    size = _NUM_LAYERS // num_stages
    stages = {stage: torch.nn.Sequential(*layers[stage * size :][:size]) for stage in range(num_stages)}
    with Pipeline(stages, timetable, torch.nn.functional.mse_loss) as pipeline:
        optimizer = AdamW(pipeline.parameters(), lr=1e-3, gradient_release=release != "off")
        if release != "off":
            pipeline.release_gradients(optimizer, accumulate=release == "accumulate")
        if watch is not None:
            watch(pipeline)
        batch = torch.randn(_NUM_MICROBATCHES, _SIZE)
        losses: list[float] = []
        for _ in range(_NUM_STEPS):
            losses += map(float, pipeline.step(batch, target=batch))
            if release == "off":
                optimizer.step()
                optimizer.zero_grad()
        return losses
