"""Part split: zbpp's split beside plain backward and torch's, on one stage: eager, by graphs, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from zbpp.benchmark.gpu import stage_graphs
from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.benchmark.split.contestants import Compiled, Contestant
from zbpp.benchmark.split.memory import levels
from zbpp.benchmark.split.sections import available_contestants
from zbpp.benchmark.split.stages import Microbatch, llama_stage, step, x_and_dy
from zbpp.benchmark.split.stages import Settings as Sizes
from zbpp.benchmark.split.timing import Rounds, Times, interleaved, milliseconds, ratios
from zbpp.runtime.measure.memory import Level

_MIB = 2**20
_BYTES_PER_VALUE = 70.0  # that a block's F holds and B needs on top, per token and hidden unit, roughly
_FOR_COMPILED = 0.45  # of the part's time, kept for the compiled stage


def rows(settings: Settings) -> Iterator[Row]:
    """Memory, device time and host time of F, B and W."""
    sizes = sizes_for(settings)
    stage = llama_stage(sizes.blocks, sizes, sizes.hidden)
    num_weights = sum(each.numel() for each in stage.parameters())
    yield Row(
        f"a stage of {num_weights / 1e9:.3g}e9 weights: {sizes.blocks} Llama blocks of hidden "
        f"{sizes.hidden}, x {sizes.batch} x {sizes.time} tokens, {sizes.dtype}"
    )
    is_full = settings.is_small or num_weights >= 0.9e9
    if not is_full:
        yield Row("the GPU has too little free memory for 1e9 weights: the marks are not for this size")
    x, dy = x_and_dy(stage, sizes.batch, sizes.time, sizes)
    contestants, remarks = available_contestants(replace(sizes, time=min(sizes.time, 32)))
    for remark in remarks:
        yield Row(remark)
    # zbpp's column comes first: it is the one that marks are compared with.
    contestants = {name: contestants[name] for name in ("zbpp", "plain", "torch") if name in contestants}
    for name in _too_large(contestants, stage, x, dy):
        yield Row(f"{name}: out of memory on this stage")
        del contestants[name]
    yield from _unmarked(_memory(contestants, stage, x, dy, settings), is_full)
    yield from _unmarked(_times(contestants, stage, x, dy, settings, 1 - _FOR_COMPILED), is_full)
    yield from _host(contestants, stage, x, dy, settings)
    yield from stage_graphs.rows(stage, x, settings)
    yield from _compiled(contestants["zbpp"], stage, x, dy, settings)


def sizes_for(settings: Settings) -> Sizes:
    """The largest of some sizes that should take below 80 % of the device's free memory, or the smallest."""
    if settings.is_small:
        return Sizes(device=settings.device, hidden=64, batch=2, time=32, blocks=2)
    free = torch.cuda.mem_get_info()[0] if settings.is_cuda else 8 * 2**30
    tried = [(4096, 4), (4096, 2), (4096, 1), (2048, 2), (1024, 1)]
    for hidden, batch in tried:
        sizes = Sizes(
            device=settings.device, dtype="bfloat16", hidden=hidden, batch=batch, time=2048, blocks=5
        )
        if _bytes_needed(sizes) < 0.8 * free:
            break
    return sizes


def _bytes_needed(sizes: Sizes) -> float:
    weights = 4.0 * 12 * sizes.hidden**2 * sizes.blocks  # with gradients, in bfloat16
    return weights + _BYTES_PER_VALUE * sizes.batch * sizes.time * sizes.hidden * sizes.blocks


def _too_large(contestants: Mapping[str, Contestant], stage: nn.Module, x: Tensor, dy: Tensor) -> list[str]:
    """The contestants that run out of memory. Raises OutOfMemoryError for zbpp and plain backward."""
    found = []
    for name, contestant in contestants.items():
        try:
            step(contestant, stage, x, dy)
        except torch.OutOfMemoryError:
            if name in ("zbpp", "plain"):
                raise
            found.append(name)
    if found:
        torch.cuda.empty_cache()
    return found


def _unmarked(found: Iterator[Row], is_full: bool) -> Iterator[Row]:
    for row in found:
        yield row if is_full else replace(row, mark=None)


def _memory(
    contestants: Mapping[str, Contestant], stage: nn.Module, x: Tensor, dy: Tensor, settings: Settings
) -> Iterator[Row]:
    found = {}
    for name, contestant in contestants.items():
        step(contestant, stage, x, dy)  # allocates what stays from then on
        found[name] = levels(Microbatch(contestant, stage, x, dy).phases, settings.device)
    figures: dict[str, Callable[[dict[str, Level]], int]] = {
        "live after F, MiB": lambda each: each["F"].after,
        "highest in B, MiB": lambda each: each["B"].highest,
        "live after B, MiB": lambda each: each["B"].after,
        "left after W, MiB": lambda each: each["W"].after,
    }
    for text, figure in figures.items():
        yield Row(text, {name: figure(each) / _MIB for name, each in found.items()}, ".1f")
    after = {name: each["B"].after / each["F"].after for name, each in found.items()}
    yield Row("live bytes after B / after F", after, mark="after_b")


def _times(
    contestants: Mapping[str, Contestant],
    stage: nn.Module,
    x: Tensor,
    dy: Tensor,
    settings: Settings,
    part: float,
) -> Iterator[Row]:
    """Rows of times until all work is done: each phase ends with a synchronisation."""
    found = interleaved(
        contestants,
        stage,
        x,
        dy,
        rounds=_rounds(contestants, stage, x, dy, settings, part),
        steps=1,
        device=settings.device,
    )
    yield from _time_rows(found, "")
    values, noise = ratios(found, lambda times: times.b + times.w)
    yield Row("(B + W) / backward", _first("zbpp", values), mark="backward", noise=noise)
    whole, _ = ratios(found, sum)
    yield Row("(F + B + W) / (F + backward)", _first("zbpp", whole))


def _time_rows(found: Rounds, of: str) -> Iterator[Row]:
    for place, phase in enumerate("FBW"):
        at = partial(_at, place)
        yield Row(f"{of}{phase}, ms", milliseconds(found, at))


def _at(place: int, times: Times) -> float:
    return times[place]


def _first(name: str, values: dict[str, float]) -> dict[str, float]:
    return {name: values[name], **values}


def _rounds(
    contestants: Mapping[str, Contestant],
    stage: nn.Module,
    x: Tensor,
    dy: Tensor,
    settings: Settings,
    part: float,
) -> int:
    """As many rounds as fit: 3 to 15."""
    if settings.is_small:
        return 3
    begin = time.perf_counter()
    for contestant in contestants.values():
        step(contestant, stage, x, dy)
    settings.synchronize()
    one = time.perf_counter() - begin
    left = settings.left - (1 - part) * settings.seconds
    return max(3, min(15, int(0.7 * left / one)))


def _host(
    contestants: Mapping[str, Contestant], stage: nn.Module, x: Tensor, dy: Tensor, settings: Settings
) -> Iterator[Row]:
    """Rows of times until the host is free again; the device is idle when a phase begins."""
    found: dict[str, list[list[float]]] = {name: [] for name in contestants}
    with without_garbage_collection():
        for _ in range(2 if settings.is_small else 5):
            for name, contestant in contestants.items():
                found[name].append(_host_times(Microbatch(contestant, stage, x, dy).phases, settings))
    for place, phase in enumerate("FBW"):
        values = {name: median(each[place] for each in rounds) for name, rounds in found.items()}
        yield Row(f"host time of {phase}, ms", values)


def _host_times(phases: Mapping[str, Callable[[], None]], settings: Settings) -> list[float]:
    times = []
    for run in phases.values():
        settings.synchronize()
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    settings.synchronize()
    return times


def _compiled(
    eager: Contestant, stage: nn.Module, x: Tensor, dy: Tensor, settings: Settings
) -> Iterator[Row]:
    """F, B and W compiled, beside the eager split."""
    # Small: the graphs are made, and run as they are; Inductor would compile for a minute.
    compiled = Compiled("eager" if settings.is_small else "inductor")
    begin = time.perf_counter()
    step(compiled, stage, x, dy)
    settings.synchronize()
    yield Row("compiled: first microbatch, s", {"compiled": time.perf_counter() - begin}, ".1f")
    contestants: dict[str, Contestant] = {"compiled": compiled, "zbpp": eager}
    for row in _memory(contestants, stage, x, dy, settings):
        if row.mark:
            yield replace(row, what=f"compiled: {row.what}", mark=None)
    rounds = _rounds(contestants, stage, x, dy, settings, 1.0)
    found = interleaved(contestants, stage, x, dy, rounds=rounds, steps=1, device=settings.device)
    yield from _time_rows(found, "compiled: ")
    for row in _host(contestants, stage, x, dy, settings):
        yield replace(row, what=f"compiled: {row.what}")
