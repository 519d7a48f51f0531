"""Activation offload measured: bytes that leave the device, and time per step beside none.

Bytes: one process, feed-forward blocks; offloaded values are in a file, so they are in no tensor. Under GPipe
the values that F saves leave the device; where all W's come last, the values that W reads leave, too.
Times: EMULATED stages and EMULATED copies, which sleep, on four ranks. k is the round-trip time of the values
that F saves, divided by the time of F, B and W of a microbatch on a rank (PipeOffload, arXiv:2503.01328): at
k <= 1 offload should cost no time. The pipelines of a schedule run their steps in turns, and each is compared
with the step without offload of the same turn: so other work of the machine slows both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn

from zbpp.autograd.copies import HostCopier, Moves, Watch
from zbpp.launch import on_ranks
from zbpp.models.emulated import Emulated, sleep
from zbpp.planning import plan
from zbpp.runtime import ActivationOffload, Pipeline, Recorder
from zbpp.runtime.memory import live_bytes
from zbpp.runtime.world import gather, world
from zbpp.schedule import Costs, Timetable, choose_offload, simulate

_CPU = torch.device("cpu")
_NUM_MICROBATCHES, _ROWS, _SIZE, _WIDE = 8, 64, 64, 1024
_NUM_RANKS, _SCHEDULES, _NUM_TURNS = 4, ("1f1b", "zb_h1", "zb_v"), 5
_PASS_MS = 20.0  # of F, of B and of W of a microbatch on a rank
_NONE, _AUTO, _ALL = "none", "auto", "all, late or not"
_CASES = ((0.0, _NONE), (0.5, _AUTO), (1.0, _AUTO), (2.0, _AUTO), (2.0, _ALL))  # (k, what leaves)


class _Times(NamedTuple):
    """ms: measured, the median; ratio: to the step without offload of the same turn, the median.

    peak: simulated, the largest of a rank, in activations of a stage.
    """

    simulated: float
    ms: float
    ratio: float
    peak: float


def rows() -> list[tuple[str, str]]:
    """(what, figure) of each line."""
    late = " ".join(f"0{op}{microbatch}" for op in "FBW" for microbatch in range(_NUM_MICROBATCHES))
    timetables = {"gpipe": plan("gpipe", 1, _NUM_MICROBATCHES), "all W late": Timetable.parse(late)}
    bytes_rows = [row for each in timetables.items() for row in _bytes_rows(*each)]
    return [*bytes_rows, *_time_rows()]


def _bytes_rows(name: str, timetable: Timetable) -> list[tuple[str, str]]:
    costs = Costs(f=2, b=2, w=2, host=0.1)
    with tempfile.TemporaryDirectory() as folder:
        offload = ActivationOffload(to=folder, costs=costs)
        without, losses, _ = _held(timetable, None)
        left, offloaded, nbytes = _held(timetable, offload)
    in_bytes = costs.in_bytes(nbytes["saved"], nbytes["deferred"])
    before = simulate(timetable, in_bytes)
    after = simulate(timetable, in_bytes, choose_offload(before, in_bytes))
    planned = before.peak_memory[0] - after.peak_memory[0]
    num_equal = sum(map(float.__eq__, losses, offloaded))
    what = f"most device bytes of a step, {name} on one rank"
    return [
        (f"losses with offload equal to the last bit, {name}", f"{num_equal} of {len(losses)}"),
        (f"{what}, none", f"{without:,}"),
        (f"{what}, offload", f"{left:,}"),
        ("down by (planned)", f"{without - left:,} ({planned:,.0f}, {(without - left) / planned:.1%} of it)"),
    ]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_SIZE)
        self.first, self.second = nn.Linear(_SIZE, _WIDE), nn.Linear(_WIDE, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return y


def _held(timetable: Timetable, offload: ActivationOffload | None) -> tuple[int, list[float], dict[str, int]]:
    """The most bytes of a step, its losses, and per kind of value the bytes of a microbatch that leave."""
    torch.manual_seed(0)
    x = torch.randn(_NUM_MICROBATCHES * _ROWS, _SIZE)
    losses: list[float] = []
    with Pipeline({0: nn.Sequential(_Block(), _Block())}, timetable, F.mse_loss, offload=offload) as pipeline:

        def step() -> None:
            losses.extend(each.item() for each in pipeline.step(x, target=x))

        for _ in range(2):
            step()
        level = live_bytes(step, _CPU)
        nbytes = {name: pipeline.offloaded_bytes(name).get(0, 0) for name in ("saved", "deferred")}
        return level.highest, losses, nbytes


def _time_rows() -> list[tuple[str, str]]:
    table = []
    for name, found in zip(_SCHEDULES, on_ranks(_NUM_RANKS, _on_rank, _SCHEDULES), strict=True):
        for (k, leaving), each in zip(_CASES, found, strict=True):
            times = _Times(*each)
            what = leaving if leaving == _NONE else f"k={k:g}, {leaving}"
            change = "" if leaving == _NONE else f" ({times.ratio - 1:+.1%} of none)"
            table.append(
                (
                    f"EMULATED {name}, {_NUM_RANKS} ranks, {what}",
                    f"{times.simulated:.1f} ms simulated, {times.ms:.1f} measured{change}, "
                    f"peak {times.peak:.1f} stage-activations",
                )
            )
    return table


class _EmulatedCopier(HostCopier):
    """EMULATED: a copy takes so many ms per byte longer."""

    ms_per_byte = 0.0

    def _copy(self, copy: Callable[[UntypedStorage, Any], None], moves: Moves, watch: Watch | None) -> None:
        def slow(storage: UntypedStorage, space: Any) -> None:
            sleep(storage.nbytes() * self.ms_per_byte)
            copy(storage, space)

        super()._copy(slow, moves, watch)


def _on_rank(names: Sequence[str]) -> list[list[tuple[float, ...]]]:
    with world(device="cpu", timeout=120.0):
        return [_timed(plan(name, _NUM_RANKS, _NUM_MICROBATCHES)) for name in names]


def _timed(timetable: Timetable) -> list[tuple[float, ...]]:
    """The _Times of each case."""
    one_pass = _PASS_MS * _NUM_RANKS / timetable.num_stages
    passes = Costs(f=one_pass, b=one_pass, w=one_pass)
    model = Emulated(num_layers=timetable.num_stages, f=one_pass, b=one_pass, w=one_pass, hidden_size=64)
    saved, deferred = _sizes(model, timetable)
    plans, pipelines = [], []
    for k, leaving in _CASES:
        host = k * 3 * one_pass / 2
        costs = replace(passes, host=host).in_bytes(saved, deferred)
        without = simulate(timetable, costs)
        chosen = choose_offload(without, costs, late=leaving == _ALL)
        plans.append(simulate(timetable, costs, chosen))
        copier = _EmulatedCopier(_CPU)
        copier.ms_per_byte = host / saved
        gib: Any = "auto" if leaving == _AUTO else 1.0
        offload = ActivationOffload(gib, copier, costs, least_bytes=1) if k else None
        pipelines.append(Pipeline(model, timetable, offload=offload))
    spans = _in_turns(pipelines)
    for pipeline in pipelines:
        pipeline.close()
    return [
        _Times(
            planned.makespan,
            median(own),
            median([one / none for one, none in zip(own, spans[0], strict=True)]),
            max(planned.peak_memory) / saved,
        )
        for planned, own in zip(plans, spans, strict=True)
    ]


def _batch() -> Tensor:
    return torch.randn(_NUM_MICROBATCHES * _ROWS, 64)


def _in_turns(pipelines: Sequence[Pipeline]) -> list[list[float]]:
    """Each pipeline's times, one per turn; a first turn is not counted."""
    spans: list[list[float]] = [[] for _ in pipelines]
    x = _batch()
    for turn in range(_NUM_TURNS + 1):
        for own, pipeline in zip(spans, pipelines, strict=True):
            with pipeline.using(Recorder()) as recorder:
                pipeline.step(x, target=x)
            if turn:
                own.append(recorder.timeline().makespan)
    return spans


def _sizes(model: Emulated, timetable: Timetable) -> tuple[int, int]:
    """The most bytes of a microbatch that leave between F and B, and between B and W, of any stage."""
    with Pipeline(model, timetable, offload=ActivationOffload(least_bytes=1)) as pipeline:
        pipeline.step(_batch(), target=_batch())  # all that can leaves
        found = [pipeline.offloaded_bytes(name).values() for name in ("saved", "deferred")]
    saved, deferred = (max(max(each) for each in gather(list(some))) for some in found)
    return saved, deferred


if __name__ == "__main__":
    for what, figure in rows():
        print(f"{what}: {figure}")
