"""Run sections of the benchmark, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from zbpp.benchmark.split.compiled import compiled
from zbpp.benchmark.split.contestants import Contestant, Plain, Torch, Zbpp
from zbpp.benchmark.split.counts import products, recompute
from zbpp.benchmark.split.memory import memory
from zbpp.benchmark.split.report import Line
from zbpp.benchmark.split.stages import Settings, llama_stage, step, x_and_dy
from zbpp.benchmark.split.timing import SPREAD, compute, host

SECTIONS: dict[str, Callable[[Mapping[str, Contestant], Settings], Iterator[Line]]] = {
    "memory": memory,
    "products": products,
    "recompute": recompute,
    "host": host,
    "compute": compute,
    "compiled": compiled,
}

_BUSY = 0.10  # a spread of plain backward's rounds above it says that the machine did other work, too


def available_contestants(settings: Settings) -> tuple[dict[str, Contestant], list[str]]:
    """The contestants by name, and a remark on torch's split if it can't take part."""
    found: dict[str, Contestant] = {"plain": Plain(), "zbpp": Zbpp()}
    try:
        torchs = Torch()
        stage = llama_stage(1, settings)
        step(torchs, stage, *x_and_dy(stage, 1, 2, settings))
    except Exception as error:  # a private function that has changed may raise anything
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        return found, [
            f"torch {torch.__version__}: its private stage_backward_input can't be used ({problem})"
        ]
    return {**found, "torch": torchs}, []


def measure(
    sections: Iterable[str], settings: Settings, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Line], list[str]]:
    """The lines of these sections, and remarks. say: is called with the name of what was measured."""
    sections, lines = list(sections), []
    if "host" in sections:
        # Before torch's split is used: it registers hooks, and once there are any, zbpp's B looks for them
        # at every site.
        lines += _run("host", {"plain": Plain(), "zbpp": Zbpp()}, settings, say)
    contestants, remarks = available_contestants(settings)
    for section in sections:
        found = _run(section, contestants, settings, say)
        if section == "host":
            found = [replace(line, figure=f"{line.figure}, with hooks", limit=None) for line in found]
        lines += found
    if any(SPREAD in line.figure and line.values["plain"] > _BUSY for line in lines):
        remarks.append(
            "BUSY MACHINE: plain backward's own time varied; repeat this before relying on the ratios"
        )
    return lines, remarks


def _run(
    section: str, contestants: Mapping[str, Contestant], settings: Settings, say: Callable[[str], None]
) -> list[Line]:
    say(section)
    lines = []
    for line in SECTIONS[section](contestants, settings):
        lines.append(line)
        say(f"{section}: {line.figure}")
    return lines
