#!/usr/bin/env python
"""What zbpp does on ONE GPU, checked and measured, without the internet.

    python scripts/gpu_check.py                         # writes one page, scripts/results/gpu_NAME.txt
    python scripts/gpu_check.py split offload           # these parts only
    python scripts/gpu_check.py --device cpu --small    # tries the check itself, in less than a minute

    split      a stage of 1e9 weights in bfloat16, beside plain backward and torch's split: memory, times
    graphs     CUDA graphs of actions beside eager actions: host time, step time, losses
    schedules  a pipeline of one rank under every schedule: losses and gradients beside plain autograd's
    offload    bandwidth of copies to host memory and back; a pipeline with and without offload

It runs from a clone, with the Python that has torch (2.11 or newer) and numpy. Each row is printed and
written as soon as it is known. If a part loses the device, run the parts behind it by their names. The tests
for a GPU are `pytest -m gpu`. A row with a limit compares zbpp's value with it. Exit status: 0, or 1 if a
limit was missed or a part failed. NOT RUN ON A GPU YET: `--device cpu --small` runs the same code, small.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_split
import torch
from bench_split import Row, Sizes, llama_stage, run_step, text_of, usable_columns, x_and_dy
from torch import Tensor, nn

from zbpp.autograd.offload.host_copier import Copier
from zbpp.models.llama import Llama
from zbpp.planning import SCHEDULES, plan
from zbpp.runtime import ActivationOffload, Pipeline
from zbpp.runtime.extra import Extra
from zbpp.runtime.graphs import CudaGraphs
from zbpp.runtime.measure import Recorder, StepRecord
from zbpp.runtime.measure.live_tensors import live_bytes
from zbpp.schedule import Costs, PlanError, Timetable
from zbpp.training.measured_steps import machine

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Settings:
    """device: "cuda" or "cpu". is_small: sizes that a CPU does in seconds; exact limits alone hold there."""

    device: str
    is_small: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.is_cuda else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_small else torch.bfloat16

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


# ---------------------------------------------------------------- part split


def split(settings: Settings) -> Iterator[Row | str]:
    """bench_split.py's memory and times on one large stage."""
    sizes = _sizes(settings)
    stage = llama_stage(sizes.blocks, sizes.hidden, sizes)
    num_weights = sum(each.numel() for each in stage.parameters())
    yield f"{num_weights / 1e9:.3g}e9 weights, x {sizes.batch} x {sizes.time} x {sizes.hidden}, {sizes.dtype}"
    columns, remarks = usable_columns(sizes)
    yield from remarks
    if "torch" in columns:
        try:
            run_step(columns["torch"], stage, *x_and_dy(stage, sizes.batch, sizes.time, sizes))
        except torch.OutOfMemoryError:
            del columns["torch"]
            yield "torch's split: out of memory on this stage"
    is_full = num_weights >= 0.9e9  # the limits are those of a large stage
    for measure in (bench_split.memory, bench_split.compute):
        for row in measure(columns, sizes):
            yield row if is_full else replace(row, limit=None)


def _sizes(settings: Settings) -> Sizes:
    """The largest sizes that should take below 80 % of the free memory, or the smallest."""
    if settings.is_small:
        return Sizes(device=settings.device, hidden=64, batch=2, time=32, blocks=2, rounds=3)
    free = torch.cuda.mem_get_info()[0] if settings.is_cuda else 8 * GIB
    for hidden, batch in ((4096, 4), (4096, 2), (4096, 1), (2048, 2), (1024, 1)):
        sizes = Sizes(
            device=settings.device,
            dtype="bfloat16",
            hidden=hidden,
            batch=batch,
            time=2048,
            blocks=5,
            rounds=7,
        )
        weights = 4 * 12 * hidden**2 * sizes.blocks  # bytes, with gradients
        activations = 70 * batch * sizes.time * hidden * sizes.blocks  # about, with what B needs on top
        if weights + activations < 0.8 * free:
            break
    return sizes


# ---------------------------------------------------------------- parts graphs and schedules


class Run(NamedTuple):
    """Steps of a pipeline of one rank. losses: of all steps; gradients: of the last; times: medians."""

    losses: Tensor
    gradients: dict[str, Tensor]
    host_us: float  # of an action
    host_ms: float  # until step() returns
    step_ms: float  # until the device has done the step
    peak: int  # live bytes of a step, over those before it


def _pipeline(
    name: str, model: Llama, batch: tuple[Tensor, Tensor], settings: Settings, *extras: Extra
) -> Run:
    """Six steps of a Llama on one rank, four microbatches each; a CUDA graph is captured in the third."""
    torch.manual_seed(0)
    timetable = plan(name, 1, 4, time_limit=1.0)
    stages = _stages(model, timetable, settings)
    x, target = batch
    losses, times = list[Tensor](), list[tuple[float, float]]()
    with Pipeline(stages, timetable, model.loss, extras=extras) as pipeline:
        for _ in range(6):
            for stage in stages.values():
                stage.zero_grad(set_to_none=False)  # a captured step adds to the same .grad
            settings.synchronize()
            begin = time.perf_counter()
            losses += pipeline.step(x, target=target)
            returned = time.perf_counter()
            settings.synchronize()
            times.append((returned - begin, time.perf_counter() - begin))
        gradients = _gradients(stages)
        record = StepRecord(torch.device("cpu"))  # the host's clock
        with pipeline.using(Recorder(record)):
            pipeline.step(x, target=target)
        settings.synchronize()
        peak = live_bytes(lambda: pipeline.step(x, target=target), settings.torch_device).highest
    host_ms, step_ms = (1e3 * median(each) for each in zip(*times[3:], strict=True))
    host_us = 1e3 * mean((record.times()[:, 1] - record.times()[:, 0]).tolist())
    return Run(torch.stack(losses), gradients, host_us, host_ms, step_ms, peak)


def _llama(hidden: int, length: int, settings: Settings) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """A Llama of four layers, and inputs and targets for four microbatches of two rows."""
    model = Llama(
        vocab_size=256,
        num_layers=4,
        hidden_size=hidden,
        num_heads=max(1, hidden // 64),
        sequence_length=length,
    )
    drawn = torch.randint(256, (8, length + 1), generator=torch.Generator().manual_seed(0))
    drawn = drawn.to(settings.torch_device)
    return model, (drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def _stages(model: Llama, timetable: Timetable, settings: Settings) -> dict[int, nn.Module]:
    numbers = range(timetable.num_stages)
    built = {each: model.build_stage(each, timetable.num_stages) for each in numbers}
    return {each: stage.to(settings.torch_device, settings.dtype) for each, stage in built.items()}


def _gradients(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    named = (each for stage in stages.values() for each in stage.named_parameters())
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def graphs(settings: Settings) -> Iterator[Row | str]:
    """Host time of an action and of a step, and whether losses and gradients are equal."""
    model, batch = _llama(*((32, 16) if settings.is_small else (1024, 512)), settings)
    for name in ("zb_h1", "zb_v"):
        row = partial(Row, name)
        eager = _pipeline(name, model, batch, settings)
        found = {"eager": eager}
        if settings.is_cuda:
            found["zbpp"] = replayed = _pipeline(name, model, batch, settings, CudaGraphs())
            unlike = float((replayed.losses != eager.losses).sum())
            yield row("losses unlike eager's", {"zbpp": unlike}, ".0f", limit=0)
            unlike = float(_num_unlike(replayed.gradients, eager.gradients))
            yield row("gradients unlike eager's", {"zbpp": unlike}, ".0f")
            limit = None if settings.is_small else 0.2
            share = replayed.host_us / eager.host_us
            yield row("host time per action, graphs / eager", {"zbpp": share}, limit=limit)
        else:
            yield f"{name}: graphs not measured: they need a GPU"
        yield row("host time per action, us", {key: each.host_us for key, each in found.items()}, ".1f")
        yield row("step() returns after, ms", {key: each.host_ms for key, each in found.items()})
        yield row("a step takes, ms", {key: each.step_ms for key, each in found.items()})
        yield row("most live bytes, MiB", {key: each.peak / MIB for key, each in found.items()}, ".1f")


def schedules(settings: Settings) -> Iterator[Row | str]:
    """For each schedule, how many losses and gradients differ from plain autograd's."""
    model, batch = _llama(*((16, 12) if settings.is_small else (512, 256)), settings)
    losses, gradients = _plain(model, batch, settings)
    for name in SCHEDULES:
        try:
            found = _pipeline(name, model, batch, settings)
        except PlanError as error:
            yield f"{name}: not with one rank: {error}"
            continue
        unlike = float((found.losses != losses.repeat(len(found.losses) // len(losses))).sum())
        yield Row("schedules", f"{name}: losses unlike plain's", {"zbpp": unlike}, ".0f", limit=0)
        values = {
            "unlike": float(_num_unlike(found.gradients, gradients)),
            "by": _difference(found.gradients, gradients),
            "ms": found.step_ms,
        }
        yield Row("schedules", f"{name}: gradients, step", values, ".3g")


def _plain(
    model: Llama, batch: tuple[Tensor, Tensor], settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients of plain autograd, one microbatch after the other."""
    torch.manual_seed(0)
    module = model.build_stage(0, 1).to(settings.torch_device, settings.dtype)
    losses = []
    for x, target in zip(*(each.chunk(4) for each in batch), strict=True):
        loss = model.loss(module(x), target)
        torch.autograd.backward(loss, torch.full_like(loss, 1 / 4))
        losses.append(loss.detach())
    return torch.stack(losses), _gradients({0: module})


def _num_unlike(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> int:
    unlike = sum(not torch.equal(some[name], others[name]) for name in some.keys() & others.keys())
    return unlike + len(some.keys() ^ others.keys())


def _difference(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest difference, each parameter's relative to its largest gradient."""
    if some.keys() != others.keys():
        return float("inf")
    return max(float((some[name] - each).abs().max() / each.abs().max()) for name, each in others.items())


# ---------------------------------------------------------------- part offload


def offload(settings: Settings) -> Iterator[Row | str]:
    """Bandwidth, and a pipeline with and without offload."""
    row = partial(Row, "offload")
    nbytes = 4 * MIB if settings.is_small else 512 * MIB
    copier = Copier(settings.torch_device)
    try:
        leaving = copier.new_storage(nbytes), copier.host_memory(nbytes)
        out = _seconds(lambda: copier.out([leaving]).wait(), settings)
        back = _seconds(lambda: copier.back([leaving]).wait(), settings)
        yield row("bandwidth, GiB/s", {"out": nbytes / GIB / out, "back": nbytes / GIB / back}, ".1f")
    finally:
        copier.close()
    model, batch = _llama(*((32, 16) if settings.is_small else (1024, 512)), settings)
    everything = ActivationOffload(costs=Costs(f=2, b=2, w=2, host=0.1))
    found = {
        "without": _pipeline("gpipe", model, batch, settings),
        "with": _pipeline("gpipe", model, batch, settings, everything),
    }
    yield row("gpipe: a step takes, ms", {name: each.step_ms for name, each in found.items()})
    yield row("gpipe: most live bytes, MiB", {name: each.peak / MIB for name, each in found.items()}, ".1f")
    unlike = float((found["with"].losses != found["without"].losses).sum())
    yield row("gpipe: losses that differ", {"zbpp": unlike}, ".0f", limit=0)


def _seconds(run: Callable[[], object], settings: Settings) -> float:
    """The median time of a run until the device is done; a first run is not counted."""
    times = []
    for _ in range(6):
        settings.synchronize()
        begin = time.perf_counter()
        run()
        settings.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


# ---------------------------------------------------------------- the page


PARTS: dict[str, Callable[[Settings], Iterator[Row | str]]] = {
    "split": split,
    "graphs": graphs,
    "schedules": schedules,
    "offload": offload,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: see above."""
    options = parse(arguments)
    settings, status = Settings(options.device, options.small), 0
    device = torch.cuda.get_device_name(0) if settings.is_cuda else "cpu"
    path = options.out / f"gpu_{'_'.join(device.lower().split())}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) as file:

        def write(line: str) -> None:
            print(line, flush=True)
            print(line, file=file)

        write(f"{machine(settings.torch_device)}, CUDA {torch.version.cuda}, {time.strftime('%Y-%m-%d')}")
        if options.small:
            write("THE SMALL FORM, whose times and bytes say nothing")
        for name in options.parts:
            write(f"\n{name}")
            try:
                for found in PARTS[name](settings):
                    write(found if isinstance(found, str) else text_of(found))
                    status |= isinstance(found, Row) and found.is_met is False
            except Exception as error:  # whatever it is belongs into the page
                status = 1
                write(f"NOT COMPLETE: {type(error).__name__}: {error}")
    return status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program where they are wrong, with what to write instead."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the check itself")
    parser.add_argument("--out", type=Path, default=ROOT / "scripts/results", help="its folder")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"part {name!r} does not exist: write some of {', '.join(PARTS)}")
    options.parts = options.parts or [*PARTS]
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu is for trying the check itself: write --device cpu --small")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU: --device cpu --small tries the check itself")
    return options


if __name__ == "__main__":
    sys.exit(main())
