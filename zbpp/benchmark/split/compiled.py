"""Section compiled: zbpp's split with F, B and W compiled, beside the eager split."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter

from zbpp.benchmark.split.contestants import Compiled, Contestant, Zbpp
from zbpp.benchmark.split.memory import levels
from zbpp.benchmark.split.report import Line
from zbpp.benchmark.split.stages import Microbatch, Settings, llama_stage, step, x_and_dy
from zbpp.benchmark.split.timing import Rounds, Times, interleaved, milliseconds

Part = Callable[[Times], float]


def compiled(_: Mapping[str, Contestant], settings: Settings) -> Iterator[Line]:
    contestants: dict[str, Contestant] = {"zbpp": Zbpp(), "compiled": Compiled()}
    line = partial(Line, section="compiled", marked="compiled")
    yield from _memory(line, contestants, settings)
    # The wider the stage, the more time is spent in products and attention: both sides call the same kernels.
    for hidden, limit in ((settings.hidden // 2, 0.93), (settings.hidden, None)):
        stage = llama_stage(settings.blocks, settings, hidden)
        x, dy = x_and_dy(stage, settings.batch, settings.time, settings)
        found = interleaved(
            contestants, stage, x, dy, rounds=settings.compute_rounds, steps=1, device=settings.device
        )
        yield from _beside_eager(line, found, f"compute, hidden {hidden}", {"F+B+W": (sum, limit)})
    stage = llama_stage(max(settings.depths), settings)
    x, dy = x_and_dy(stage, 1, 4, settings)
    found = interleaved(contestants, stage, x, dy, rounds=settings.rounds, steps=2, device=settings.device)
    each_phase = {phase: (itemgetter(place), 1.0) for place, phase in enumerate("FBW")}
    yield from _beside_eager(line, found, f"host, {max(settings.depths)} blocks", each_phase)


def _memory(
    line: Callable[..., Line], contestants: dict[str, Contestant], settings: Settings
) -> Iterator[Line]:
    stage = llama_stage(settings.blocks, settings, settings.hidden)
    x, dy = x_and_dy(stage, settings.batch, settings.time, settings)
    for contestant in contestants.values():
        step(contestant, stage, x, dy)  # compiles, and allocates what stays from then on
    found = {
        name: levels(Microbatch(each, stage, x, dy).phases, settings.device)
        for name, each in contestants.items()
    }
    eager = found["zbpp"]["F"].after
    for phase, limit in (("F", 1.0), ("B", 0.85)):
        values = {name: each[phase].after / eager for name, each in found.items()}
        yield line(figure=f"held after {phase} / zbpp's after F", values=values, limit=limit)
    left = {name: each["W"].after for name, each in found.items()}
    yield line(figure="left after W, bytes", values=left, form=".0f", limit=0)


def _beside_eager(
    line: Callable[..., Line], found: Rounds, what: str, parts: Mapping[str, tuple[Part, float | None]]
) -> Iterator[Line]:
    """Two lines per part: its time, and the median over rounds of its ratio to the eager split's time."""
    for name, (part, limit) in parts.items():
        yield line(figure=f"{what}: {name}, ms", values=milliseconds(found, part))
        values = {
            contestant: statistics.median(
                part(ours) / part(eager) for ours, eager in zip(times, found["zbpp"], strict=True)
            )
            for contestant, times in found.items()
        }
        yield line(figure=f"{what}: {name} / zbpp's", values=values, limit=limit)
