"""Activation offload measured: bytes that leave the device, and time per step beside none.

Bytes: one process, feed-forward blocks under GPipe, activations in a file, so that they are in no tensor.
Times: EMULATED stages and EMULATED copies, which sleep, on four ranks. k is the time of a round trip over
that of a microbatch's F, B and W on a rank (PipeOffload, arXiv:2503.01328): at k <= 1 offload is to be free.
"""

from __future__ import annotations

import tempfile
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.autograd.copies import Copy, HostCopier
from zbpp.launch import on_ranks
from zbpp.models.emulated import Emulated, sleep
from zbpp.planning import plan
from zbpp.runtime import ActivationOffload, Pipeline
from zbpp.runtime.memory import live_bytes
from zbpp.runtime.world import world
from zbpp.schedule import Costs, Timetable, choose_offload, simulate

_CPU = torch.device("cpu")
_NUM_MICROBATCHES, _ROWS, _SIZE, _WIDE = 8, 64, 64, 1024
_NUM_RANKS, _SCHEDULES, _NUM_STEPS = 4, ("1f1b", "zb_h1", "zb_v"), 5
_PASS_MS = 12.0  # of F, of B and of W of a microbatch on a rank
_RATIOS = (0.5, 1.0, 2.0)  # k


class _Case(NamedTuple):
    schedule: str
    k: float  # 0: nothing leaves
    gib: Any  # "auto", or a number for copies that may be late


class _Times(NamedTuple):
    simulated: float
    measured: float
    peak: float  # simulated, the largest of a rank, in stage-activations


def rows() -> list[tuple[str, str]]:
    """(what, figure) of each line."""
    return [*_bytes_rows(), *_time_rows()]


def _bytes_rows() -> list[tuple[str, str]]:
    timetable, costs = plan("gpipe", 1, _NUM_MICROBATCHES), Costs(f=2, b=2, w=2, host=0.1)
    with tempfile.TemporaryDirectory() as folder:
        offload = ActivationOffload(to=folder, costs=costs)
        without, losses, _ = _held(timetable, None)
        left, offloaded, nbytes = _held(timetable, offload)
    before = simulate(timetable, costs)
    after = simulate(timetable, costs, choose_offload(before, costs))
    planned = round((before.peak_memory[0] - after.peak_memory[0]) * nbytes)
    num_equal = sum(map(float.__eq__, losses, offloaded))
    return [
        ("losses with offload equal to the last bit", f"{num_equal} of {len(losses)}"),
        ("most device bytes of a step, gpipe on one rank, none", f"{without:,}"),
        ("most device bytes of a step, gpipe on one rank, offload", f"{left:,}"),
        ("down by (planned)", f"{without - left:,} ({planned:,}, {(without - left) / planned:.1%} of it)"),
    ]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_SIZE)
        self.first, self.second = nn.Linear(_SIZE, _WIDE), nn.Linear(_WIDE, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return y


def _held(timetable: Timetable, offload: ActivationOffload | None) -> tuple[int, list[float], int]:
    """The most bytes of a step, its losses, and the bytes of a microbatch that leave."""
    torch.manual_seed(0)
    x = torch.randn(_NUM_MICROBATCHES * _ROWS, _SIZE)
    losses: list[float] = []
    with Pipeline({0: nn.Sequential(_Block(), _Block())}, timetable, F.mse_loss, offload=offload) as pipeline:

        def step() -> None:
            losses.extend(each.item() for each in pipeline.step(x, target=x))

        for _ in range(2):
            step()
        level = live_bytes(step, _CPU)
        return level.highest, losses, pipeline.offloaded_bytes().get(0, 0)


def _time_rows() -> list[tuple[str, str]]:
    cases = [_Case(name, k, "auto") for name in _SCHEDULES for k in (0.0, *_RATIOS)]
    cases += [_Case(name, _RATIOS[-1], 1.0) for name in _SCHEDULES]
    found: list[_Times] = [_Times(*each) for each in on_ranks(_NUM_RANKS, _on_rank, cases)]
    table = []
    none: dict[str, _Times] = {}
    for case, times in zip(cases, found, strict=True):
        name, k, gib = case
        none.setdefault(name, times)
        change = "" if not k else f" ({times.measured / none[name].measured - 1:+.1%} of none)"
        what = "none" if not k else f"k={k:g}, {'auto' if gib == 'auto' else 'all, late or not'}"
        table.append(
            (
                f"EMULATED {name}, {_NUM_RANKS} ranks, {what}",
                f"{times.simulated:.1f} ms simulated, {times.measured:.1f} measured{change}, "
                f"peak {times.peak:g} stage-activations",
            )
        )
    return table


class _EmulatedCopier(HostCopier):
    """EMULATED: every copy takes so many ms longer."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__(_CPU)
        self._milliseconds = milliseconds

    def out(self, moves: list[Any]) -> Copy:
        self._thread.submit(sleep, self._milliseconds)
        return super().out(moves)

    def back(self, moves: list[Any]) -> Copy:
        self._thread.submit(sleep, self._milliseconds)
        return super().back(moves)


def _on_rank(cases: list[_Case]) -> list[tuple[float, ...]]:
    with world(device="cpu", timeout=120.0):
        return [tuple(_timed(case)) for case in cases]


def _timed(case: _Case) -> _Times:
    timetable = plan(case.schedule, _NUM_RANKS, _NUM_MICROBATCHES)
    per_rank = timetable.num_stages // _NUM_RANKS
    one_pass = _PASS_MS / per_rank
    costs = Costs(f=one_pass, b=one_pass, w=one_pass, host=case.k * 3 * one_pass / 2)
    without = simulate(timetable, costs)
    planned = simulate(timetable, costs, choose_offload(without, costs, late=case.gib != "auto"))
    offload = None
    if case.k:
        copier = _EmulatedCopier(costs.per_stage(timetable.num_stages).host[0])
        offload = ActivationOffload(case.gib, copier, costs, least_bytes=1)
    model = Emulated(num_layers=timetable.num_stages, f=one_pass, b=one_pass, w=one_pass)
    x = torch.randn(_NUM_MICROBATCHES, 8)
    spans = []
    with Pipeline(model, timetable, offload=offload) as pipeline:
        pipeline.step(x, target=x)
        for _ in range(_NUM_STEPS):
            with pipeline.recording():
                pipeline.step(x, target=x)
            spans.append(pipeline.timeline().makespan)
    return _Times(planned.makespan, median(spans), max(planned.peak_memory))


if __name__ == "__main__":
    for what, figure in rows():
        print(f"{what}: {figure}")
