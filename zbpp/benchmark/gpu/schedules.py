"""Part schedules: a pipeline of one rank under every schedule, beside plain autograd on the same device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.gpu.workload import stages_of
from zbpp.models.llama import Llama
from zbpp.planning import SCHEDULES, plan
from zbpp.runtime import Pipeline
from zbpp.schedule import PlanError

_NUM_MICROBATCHES, _NUM_LAYERS = 4, 4


class _Run(NamedTuple):
    losses: Tensor  # of all steps
    gradients: dict[str, Tensor]  # summed over the steps
    ms: float  # of the last step


def rows(settings: Settings) -> Iterator[Row]:
    """For each schedule, how many losses and gradients differ, and the time of a step."""
    plain = _plain(settings)
    yield Row(f"{_NUM_LAYERS} Llama layers, {_NUM_MICROBATCHES} microbatches, {settings.dtype}")
    yield Row("plain autograd", {"ms": plain.ms})
    num_different, before = 0, None
    for name in SCHEDULES:
        if settings.left < 3:
            yield Row(f"{name}: no time left")
            continue
        try:
            found = _under(name, settings)
        except PlanError as error:
            yield Row(f"{name}: not with one rank: {error}")
            continue
        before = found if before is None else before
        differ = int((found.losses != plain.losses).sum())
        num_different += differ
        yield Row(
            name,
            {
                "losses unlike plain's": differ,
                "gradients unlike gpipe's": _num_unlike(found.gradients, before.gradients),
                "largest difference from plain's": _difference(found.gradients, plain.gradients),
                "ms": found.ms,
            },
            form=".3g",
        )
    yield Row(
        "losses of all schedules unlike plain's", {"zbpp": num_different}, ".0f", mark="schedules_equal"
    )


def _model(settings: Settings) -> Llama:
    hidden, time_steps = (16, 12) if settings.is_small else (512, 256)
    return Llama(
        vocab_size=64,
        num_layers=_NUM_LAYERS,
        hidden_size=hidden,
        num_heads=max(2, hidden // 64),
        sequence_length=time_steps,
    )


def _batch(settings: Settings) -> tuple[Tensor, Tensor]:
    rows, length = (2, 12) if settings.is_small else (4, 256)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (_NUM_MICROBATCHES * rows, length + 1), generator=generator)
    moved = tokens.to(settings.torch_device)
    return moved[:, :-1], moved[:, 1:]


def _plain(settings: Settings) -> _Run:
    """The same run by plain autograd, one microbatch after the other."""
    model = _model(settings)
    module = model.build_stage(0, 1).to(settings.torch_device, settings.dtype)
    x, target = _batch(settings)
    losses, ms = [], 0.0
    for _ in range(2 if settings.is_small else 5):
        begin = time.perf_counter()
        for inputs, wanted in zip(x.chunk(_NUM_MICROBATCHES), target.chunk(_NUM_MICROBATCHES), strict=True):
            loss = model.loss(module(inputs), wanted)
            torch.autograd.backward(loss, torch.full_like(loss, 1 / _NUM_MICROBATCHES))
            losses.append(loss.detach())
        settings.synchronize()
        ms = 1e3 * (time.perf_counter() - begin)
    return _Run(torch.stack(losses), _gradients({0: module}), ms)


def _under(name: str, settings: Settings) -> _Run:
    timetable = plan(name, 1, _NUM_MICROBATCHES, time_limit=1.0)
    model = _model(settings)
    stages = stages_of(model, timetable, settings)
    x, target = _batch(settings)
    losses, ms = [], 0.0
    with Pipeline(stages, timetable, model.loss) as pipeline:
        for _ in range(2 if settings.is_small else 5):
            begin = time.perf_counter()
            losses += pipeline.step(x, target=target)
            settings.synchronize()
            ms = 1e3 * (time.perf_counter() - begin)
    return _Run(torch.stack(losses), _gradients(stages), ms)


def _gradients(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }


def _num_unlike(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> int:
    common = some.keys() & others.keys()
    num_missing = len(some.keys() ^ others.keys())
    return num_missing + sum(not torch.equal(some[name], others[name]) for name in common)


def _difference(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest difference, each parameter's relative to its largest gradient."""
    if some.keys() != others.keys():
        return float("inf")
    differences = [
        (some[name] - others[name]).abs().max() / others[name].abs().max().clamp(min=1e-30) for name in others
    ]
    return float(torch.stack(differences).max())
