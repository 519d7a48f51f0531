#!/usr/bin/env python
"""What zbpp does on ONE GPU, checked and measured within 8 minutes, without the internet.

    python scripts/gpu_check.py                         # writes one page, scripts/results/gpu_NAME.txt
    python scripts/gpu_check.py split offload           # these parts only
    python scripts/gpu_check.py --device cpu --small    # tries the check itself, in less than a minute

    split      a stage of 1e9 weights in bfloat16, beside plain backward and torch's split: memory, times
    graphs     CUDA graphs of actions beside eager actions: host time, step time, losses
    schedules  a pipeline of one rank under every schedule: losses and gradients beside plain autograd's
    offload    bandwidth of copies to host memory and back; a pipeline with and without offload
    tests      the tests marked `gpu`

It runs from a clone, with the Python that has torch (2.11 or newer) and numpy; the part `tests` needs pytest.
Each part runs in a process of its own, for a limited time, and writes each row as soon as the row is known: a
part that fails, takes too long or loses its device costs no other part's rows. A mark is a limit for the
first value of a row. Exit status: 0, or 1 if a mark was missed. NOT RUN ON A GPU YET: `--device cpu --small`
runs the same code on small sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_split import (
    Sizes,
    llama_stage,
    memory_rows,
    run_step,
    time_rows,
    timed_in_turns,
    usable_columns,
    x_and_dy,
)
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

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 2**20, 2**30
MARKS = {  # what the mark is about, and the limit
    "after_b": ("live bytes after B / after F, 1e9 weights in bfloat16", 0.85),
    "backward": ("(B + W) / backward, 1e9 weights in bfloat16", 1.00),
    "graphs_host": ("host time per action, CUDA graphs / eager, hidden 1024", 0.20),
    "graphs_equal": ("losses under replay that differ from eager's in any bit", 0.0),
    "schedules_equal": ("losses of all schedules that differ from plain autograd's in any bit", 0.0),
}


@dataclass(frozen=True)
class Row:
    """One line of a part. mark: the limit, of MARKS, for the first value; noise: its measuring error."""

    what: str
    values: Mapping[str, float] = field(default_factory=dict)
    form: str = ".2f"
    mark: str | None = None
    noise: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.what:<46}".rstrip()
            if not self.values
            else f"{self.what:<46}"
            + "".join(f"  {name} {value:{self.form}}" for name, value in self.values.items())
        )


@dataclass(frozen=True)
class Settings:
    """device: "cuda" or "cpu". is_small: sizes that a CPU does in seconds."""

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


def split(settings: Settings) -> Iterator[Row]:
    """Live bytes, device times and host times of F, B and W on one large stage."""
    sizes = _sizes(settings)
    stage = llama_stage(sizes.blocks, sizes.hidden, sizes)
    num_weights = sum(each.numel() for each in stage.parameters())
    is_full = num_weights >= 0.9e9
    yield Row(
        f"{num_weights / 1e9:.3g}e9 weights, x {sizes.batch} x {sizes.time} x {sizes.hidden}, {sizes.dtype}"
    )
    x, dy = x_and_dy(stage, sizes.batch, sizes.time, sizes)
    columns, remarks = usable_columns(sizes)
    yield from map(Row, remarks)
    # zbpp's column comes first: marks are for the first value.
    columns = {name: columns[name] for name in ("zbpp", "plain", "torch") if name in columns}
    if "torch" in columns:
        try:
            run_step(columns["torch"], stage, x, dy)
        except torch.OutOfMemoryError:
            del columns["torch"]
            yield Row("torch's split: out of memory on this stage")
    marks = {"after B / after F": "after_b", "(B+W) / backward": "backward"} if is_full else {}
    for row in memory_rows(columns, stage, x, dy):
        yield Row(row.figure, row.values, row.form, marks.get(row.figure))
    rounds = 3 if settings.is_small else 7
    for row in time_rows("compute", timed_in_turns(columns, stage, x, dy, rounds=rounds)):
        yield Row(row.figure, row.values, row.form, marks.get(row.figure), row.noise)


def _sizes(settings: Settings) -> Sizes:
    """The largest sizes that should take below 80 % of the free memory, or the smallest."""
    if settings.is_small:
        return Sizes(device=settings.device, hidden=64, batch=2, time=32, blocks=2)
    free = torch.cuda.mem_get_info()[0] if settings.is_cuda else 8 * GIB
    for hidden, batch in ((4096, 4), (4096, 2), (4096, 1), (2048, 2), (1024, 1)):
        sizes = Sizes(
            device=settings.device, dtype="bfloat16", hidden=hidden, batch=batch, time=2048, blocks=5
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


def graphs(settings: Settings) -> Iterator[Row]:
    """Host time of an action and of a step, and whether losses and gradients are equal."""
    model, batch = _llama(*((32, 16) if settings.is_small else (1024, 512)), settings)
    for name in ("zb_h1", "zb_v"):
        eager = _pipeline(name, model, batch, settings)
        found = {"eager": eager}
        if settings.is_cuda:
            found["graphs"] = replayed = _pipeline(name, model, batch, settings, CudaGraphs())
            unlike = float((replayed.losses != eager.losses).sum())
            yield Row(f"{name}: losses unlike eager's", {"graphs": unlike}, ".0f", "graphs_equal")
            unlike = float(_num_unlike(replayed.gradients, eager.gradients))
            yield Row(f"{name}: gradients unlike eager's", {"graphs": unlike}, ".0f")
            share = replayed.host_us / eager.host_us
            yield Row(f"{name}: host time per action, graphs / eager", {"graphs": share}, mark="graphs_host")
        else:
            yield Row(f"{name}: graphs not measured: they need a GPU")
        yield Row(
            f"{name}: host time per action, us", {key: each.host_us for key, each in found.items()}, ".1f"
        )
        yield Row(f"{name}: step() returns after, ms", {key: each.host_ms for key, each in found.items()})
        yield Row(f"{name}: a step takes, ms", {key: each.step_ms for key, each in found.items()})
        peaks = {key: each.peak / MIB for key, each in found.items()}
        yield Row(f"{name}: most live bytes of a step, MiB", peaks, ".1f")


def schedules(settings: Settings) -> Iterator[Row]:
    """For each schedule, how many losses and gradients differ from plain autograd's."""
    model, batch = _llama(*((16, 12) if settings.is_small else (512, 256)), settings)
    losses, gradients = _plain(model, batch, settings)
    num_unlike = 0
    for name in SCHEDULES:
        try:
            found = _pipeline(name, model, batch, settings)
        except PlanError as error:
            yield Row(f"{name}: not with one rank: {error}")
            continue
        unlike = int((found.losses != losses.repeat(len(found.losses) // len(losses))).sum())
        num_unlike += unlike
        values = {
            "unlike losses": float(unlike),
            "unlike gradients": float(_num_unlike(found.gradients, gradients)),
            "largest difference": _difference(found.gradients, gradients),
            "ms": found.step_ms,
        }
        yield Row(name, values, ".3g")
    yield Row("losses of all schedules unlike plain's", {"zbpp": float(num_unlike)}, ".0f", "schedules_equal")


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


def offload(settings: Settings) -> Iterator[Row]:
    """Bandwidth, and a pipeline with and without offload."""
    nbytes = 4 * MIB if settings.is_small else 512 * MIB
    copier = Copier(settings.torch_device)
    try:
        leaving = copier.new_storage(nbytes), copier.host_memory(nbytes)
        out = _seconds(lambda: copier.out([leaving]).wait(), settings)
        back = _seconds(lambda: copier.back([leaving]).wait(), settings)
        yield Row("bandwidth, GiB/s", {"out": nbytes / GIB / out, "back": nbytes / GIB / back}, ".1f")
    finally:
        copier.close()
    model, batch = _llama(*((32, 16) if settings.is_small else (1024, 512)), settings)
    everything = ActivationOffload(costs=Costs(f=2, b=2, w=2, host=0.1))
    found = {
        "without": _pipeline("gpipe", model, batch, settings),
        "with": _pipeline("gpipe", model, batch, settings, everything),
    }
    yield Row("gpipe: a step takes, ms", {name: each.step_ms for name, each in found.items()})
    peaks = {name: each.peak / MIB for name, each in found.items()}
    yield Row("gpipe: most live bytes of a step, MiB", peaks, ".1f")
    unlike = float((found["with"].losses != found["without"].losses).sum())
    yield Row("gpipe: losses that differ", {"with": unlike}, ".0f")


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


# ---------------------------------------------------------------- part tests


def tests(settings: Settings) -> Iterator[Row]:
    """pytest's last line, and a row for each test that failed."""
    if not settings.is_cuda or importlib.util.find_spec("pytest") is None:
        yield Row(f"not run: {'pytest is not installed' if settings.is_cuda else 'they need a GPU'}")
        return
    # To collect all files would take longer than these tests. -c: without the suite's plugins.
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    own = ["-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "--import-mode=importlib", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *own, "-m", "gpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    *lines, last = done.stdout.strip().splitlines() or ["pytest printed nothing"]
    for line in (*(each for each in lines if each.startswith(("FAILED", "ERROR"))), last):
        yield Row(line[:200])


# ---------------------------------------------------------------- the parts, each in its process


PARTS: dict[str, tuple[Callable[[Settings], Iterator[Row]], int]] = {  # (rows, the most seconds)
    "split": (split, 150),
    "graphs": (graphs, 80),
    "schedules": (schedules, 80),
    "offload": (offload, 60),
    "tests": (tests, 100),
}


@dataclass
class Outcome:
    """What a part has found. why: why it ended early; "" if it ended well."""

    name: str
    rows: list[Row] = field(default_factory=list)
    why: str = ""
    seconds: float = 0.0


def run_part(name: str, options: argparse.Namespace) -> Outcome:
    """Run a part in a process of its own, which is ended after its time, with all that it started."""
    outcome, begin, limit = Outcome(name), time.monotonic(), PARTS[name][1]
    print(f"{name}, up to {limit} s ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        rows.touch()
        command = [sys.executable, __file__, name, "--device", options.device, "--rows", str(rows)]
        command += ["--small"] if options.small else []
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            if process.wait(limit):
                said = log.read_text(errors="replace").strip().splitlines() or ["no output"]
                outcome.why = f"ended with status {process.returncode}: {said[-1]}"
        except subprocess.TimeoutExpired:
            outcome.why = f"stopped after its {limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        whole = [line for line in rows.read_text().splitlines(keepends=True) if line.endswith("\n")]
        outcome.rows = [Row(**json.loads(line)) for line in whole]
        outcome.seconds = time.monotonic() - begin
    return outcome


def write_rows(name: str, path: Path, settings: Settings) -> None:
    """What the process of a part does."""
    with path.open("w") as file:
        for row in PARTS[name][0](settings):
            print(json.dumps(asdict(row)), file=file, flush=True)


# ---------------------------------------------------------------- the report


def verdicts(outcomes: Sequence[Outcome], *, is_real: bool) -> dict[str, str]:
    """For each mark: held, NOT HELD, or not measured. Of several rows the worst counts.

    is_real: whether device and sizes are those that the marks are for.
    """
    found = {}
    for mark, (_, limit) in MARKS.items():
        rows = [row for outcome in outcomes for row in outcome.rows if row.mark == mark]
        least = [next(iter(row.values.values())) - row.noise for row in rows]
        if not rows or not is_real:
            found[mark] = "not measured" + (f" (small form: {max(least):.2f})" if rows else "")
        else:
            # NaN is not held: it is not below any limit.
            is_held = all(value <= limit for value in least)
            found[mark] = f"{'held' if is_held else 'NOT HELD'}: {max(least):.2f}"
    return found


def report(outcomes: Sequence[Outcome], options: argparse.Namespace) -> tuple[str, bool]:
    """(the page, whether no mark was missed)."""
    found = verdicts(outcomes, is_real=options.device == "cuda" and not options.small)
    lines = [_machine(options), "", "marks"]
    lines += [f"  {text:<72} <= {limit:.2f}  {found[mark]}" for mark, (text, limit) in MARKS.items()]
    for outcome in outcomes:
        lines += ["", f"{outcome.name}, {outcome.seconds:.0f} s", *(f"  {row}" for row in outcome.rows)]
        lines += [f"  NOT COMPLETE: {outcome.why}"] if outcome.why else []
    return "\n".join(lines) + "\n", not any("NOT HELD" in each for each in found.values())


def _machine(options: argparse.Namespace) -> str:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    small = "; THE SMALL FORM, which measures nothing" if options.small else ""
    gpu = torch.cuda.get_device_properties(0) if options.device == "cuda" else "CPU"
    python = sys.version.split()[0]
    return f"{gpu}; torch {torch.__version__}, CUDA {torch.version.cuda}, Python {python}; {when}{small}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: see above."""
    options = parse(arguments)
    if options.rows is not None:
        write_rows(options.parts[0], options.rows, Settings(options.device, options.small))
        return 0
    outcomes = [run_part(name, options) for name in options.parts]
    text, is_held = report(outcomes, options)
    print(text)
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    path = options.out / f"gpu_{'_'.join(device.lower().split())}.txt"
    path.write_text(text)
    print(f"written: {path}")
    return int(not is_held)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program where they are wrong, with what to write instead."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the check itself")
    parser.add_argument("--out", type=Path, default=ROOT / "scripts/results", help="its folder")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # for the process of a part
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"part {name!r} does not exist: write some of {', '.join(PARTS)}")
    options.parts = options.parts or [*PARTS]
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu is for trying the check itself: write --device cpu --small")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU: --device cpu --small tries the check itself")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()  # better now than after eight minutes
    except OSError as error:
        parser.error(f"--out {options.out}: no file can be written there: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())
