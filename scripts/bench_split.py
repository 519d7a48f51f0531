#!/usr/bin/env python
"""The split backward beside plain backward and torch's own split, in one process.

    python scripts/bench_split.py                              # everything, on the CPU
    python scripts/bench_split.py memory products --json split.json
    python scripts/bench_split.py --device cuda --dtype bfloat16 --hidden 2048 --batch 8 --time 2048

(The last has not been run on a GPU yet.)
Stages are made of zbpp.models.llama's blocks. Each line has zbpp's mark and whether it was met.
Parameters have their .grad before F, as from the second microbatch on; x and dy arrive in F and in B
and are dropped as soon as the one measured allows it. Python's garbage collection is off.

memory    bytes live in the allocator, over those before F. On the CPU from the allocation events of
          torch.profiler, so every tensor counts, autograd's own too; on CUDA memory_allocated.
products  matrix products and attentions executed in B and W, seen by a dispatch mode.
recompute forwards of one block in B and W, each block checkpointed.
host      time with tiny tensors, by number of blocks. Ratios are medians of the rounds' ratios; the
          contestants take turns within a round. On the CPU with one thread the thread's own time, on
          CUDA the time until all is done: every phase ends with a synchronisation.
compute   time of a stage whose products take nearly all of it. Its mark is met if the median reaches
          it within the given uncertainty.
compiled  zbpp's split with F, B and W compiled beside the eager one: memory, compute and, with the
          largest number of blocks, host time. Only if named: it compiles for minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces each start on stderr

import torch
import torch.utils.checkpoint
from rich.console import Console
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.autograd import backward_input, checkpoint, explain
from zbpp.autograd.compiled import compile_stage
from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.models.llama import Llama

# ---------------------------------------------------------------- contestants


class Contestant(Protocol):
    """enter makes an input of the stage; B returns what W needs: all that is still to be kept."""

    def enter(self, x: Tensor) -> Tensor: ...
    def f(self, stage: nn.Module, x: Tensor) -> Tensor: ...
    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any: ...
    def w(self, stage: nn.Module, kept: Any) -> None: ...


class Eager:
    def f(self, stage: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = stage(x)
        return y


class Plain(Eager):
    """torch.autograd.backward; its W is empty."""

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_()

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> None:
        torch.autograd.backward([y], [dy])

    def w(self, stage: nn.Module, kept: None) -> None:
        pass


class Zbpp(Eager):
    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_().view_as(x)  # no leaf, as zbpp's runtime does

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        _, weight_grads = backward_input(y, dy, x)
        return weight_grads

    def w(self, stage: nn.Module, kept: Any) -> None:
        kept.accumulate()


class Compiled(Zbpp):
    """The stages' modules stay eager for the others."""

    def __init__(self) -> None:
        self.forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}

    def f(self, stage: nn.Module, x: Tensor) -> Tensor:
        if stage in self.forwards:
            return self.forwards[stage](x)
        compile_stage(stage)
        y: Tensor = stage(x)
        self.forwards[stage] = stage.forward
        del stage.forward
        return y


class Torch(Eager):
    """As torch.distributed.pipelining.stage.backward_one_chunk calls it, keeping what that keeps."""

    def __init__(self) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        self.input, self.weight = stage_backward_input, stage_backward_weight

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_()

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        _, groups = self.input([y], [dy], [x], stage.parameters())
        return [x], groups, (y,), (dy,)

    def w(self, stage: nn.Module, kept: Any) -> None:
        self.weight(stage.parameters(), kept[1])


def contestants(settings: Settings) -> tuple[dict[str, Contestant], list[str]]:
    """By name, and what there is to say of one that can't take part."""
    found: dict[str, Contestant] = {"plain": Plain(), "zbpp": Zbpp()}
    try:
        rival = Torch()
        stage = llama_stage(1, settings)
        step(rival, stage, *tensors(stage, 1, 2, settings))
    except Exception as error:  # whatever a changed private function may raise
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        return found, [
            f"torch {torch.__version__}: its private stage_backward_input can't be used ({problem})"
        ]
    return {**found, "torch": rival}, []


# ---------------------------------------------------------------- stages and steps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """hidden: of the stages for memory and compute; those for host time have `tiny`. rounds: of time."""

    device: str = "cpu"
    dtype: str = "float32"
    hidden: int = 512
    batch: int = 4
    time: int = 256
    blocks: int = 4
    tiny: int = 16
    depths: tuple[int, ...] = (1, 8, 32)
    rounds: int = 15
    compute_rounds: int = 15


def llama_stage(blocks: int, settings: Settings, hidden: int | None = None) -> nn.Sequential:
    """Blocks of a Llama and nothing else: a stage in the middle, its gradients made."""
    hidden = settings.tiny if hidden is None else hidden
    model = Llama(
        num_layers=blocks + 2,
        layers_per_stage=(1, blocks, 1),
        hidden_size=hidden,
        num_heads=max(1, hidden // 64),
        intermediate_size=None if hidden >= 64 else hidden,
        sequence_length=settings.time,
    )
    stage = model.build_stage(1, 3).to(settings.device, getattr(torch, settings.dtype))
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage


def tensors(stage: nn.Module, batch: int, time: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """x and dy, the same in every call."""
    size = next(parameter for parameter in stage.parameters() if parameter.dim() == 2).shape[1]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, batch, time, size, generator=generator)
    x, dy = drawn.to(settings.device, getattr(torch, settings.dtype)).unbind()
    return x, dy


Mark = Callable[[str], Any]


def step(
    contestant: Contestant,
    stage: nn.Module,
    x: Tensor,
    dy: Tensor,
    mark: Mark = lambda phase: nullcontext(),
) -> None:
    """One microbatch in three phases: F, B, W."""
    with mark("F"):
        # Copies: what arrives belongs to this microbatch.
        arrived = contestant.enter(x.clone())
        y = contestant.f(stage, arrived)
    with mark("B"):
        gradient = dy.clone()
        kept = contestant.b(stage, arrived, y, gradient)
        del arrived, y, gradient
    with mark("W"):
        contestant.w(stage, kept)
        del kept


# ---------------------------------------------------------------- lines


@dataclass(kw_only=True)
class Line:
    """One line of the table. values: by contestant; limit: a mark of `marked`, None for none."""

    section: str
    figure: str
    values: dict[str, float]
    form: str = ".2f"
    limit: float | None = None
    marked: str = "zbpp"
    noise: float = 0.0
    note: str = ""
    met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        self.met = None if self.limit is None else self.values[self.marked] - self.noise <= self.limit

    @property
    def mark(self) -> str:
        if self.limit is None:
            return ""
        noise = f" ± {self.noise:.2f}" if self.noise else ""
        return f"<= {self.limit:{self.form}}{noise}{self.note}"


# ---------------------------------------------------------------- memory


class Level(NamedTuple):
    """Live bytes of one phase, over those before F."""

    highest: int
    after: int


def levels(run: Callable[[Mark], None], device: str) -> dict[str, Level]:
    """Live bytes in each phase that `run` marks."""
    with without_garbage_collection():
        return _cuda_levels(run) if device.startswith("cuda") else _cpu_levels(run)


def _cpu_levels(run: Callable[[Mark], None]) -> dict[str, Level]:
    """From the profiler: the allocator reports every allocation and every release to it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run(lambda phase: record_function(f"phase {phase}"))
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    phase, live, found = "", 0, dict[str, Level]()
    for event in events:
        name = event.name()
        if name.startswith("phase "):
            phase = name.removeprefix("phase ")
            found[phase] = Level(live, live)
        elif name == "[memory]" and event.device_type() == DeviceType.CPU:
            live += event.nbytes()
            if phase:
                found[phase] = Level(max(live, found[phase].highest), live)
    return found


def _cuda_levels(run: Callable[[Mark], None]) -> dict[str, Level]:
    before, found = torch.cuda.memory_allocated(), dict[str, Level]()

    @contextmanager
    def mark(phase: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        highest, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        found[phase] = Level(highest - before, after - before)

    run(mark)
    return found


def memory(rivals: dict[str, Contestant], settings: Settings) -> Iterator[Line]:
    stage = llama_stage(settings.blocks, settings, settings.hidden)
    x, dy = tensors(stage, settings.batch, settings.time, settings)
    found = {}
    for name, rival in rivals.items():
        step(rival, stage, x, dy)  # whatever is made once
        found[name] = levels(partial(step, rival, stage, x, dy), settings.device)

    def line(figure: str, value: Callable[[dict[str, Level]], float], **how: Any) -> Line:
        values = {name: value(each) for name, each in found.items()}
        return Line(section="memory", figure=figure, values=values, **how)

    plain, mebi = found["plain"]["B"].highest, 2**20
    yield line("after F, MiB", lambda each: each["F"].after / mebi, form=".1f")
    yield line("highest during B, MiB", lambda each: each["B"].highest / mebi, form=".1f")
    yield line("after B, MiB", lambda each: each["B"].after / mebi, form=".1f")
    yield line("after B / after F", lambda each: each["B"].after / each["F"].after, limit=0.85)
    yield line(
        "highest during B above plain's, MiB",
        lambda each: (each["B"].highest - plain) / mebi,
        form=".1f",
        limit=_dy_bytes(stage, x) / mebi,
        note=" (held dy)",
    )
    yield line("left after W, bytes", lambda each: each["W"].after, form=".0f", limit=0)


def _dy_bytes(stage: nn.Module, x: Tensor) -> int:
    arrived = x.clone().requires_grad_()
    return explain(stage(arrived), arrived).dy_bytes


# ---------------------------------------------------------------- products

# Names begin with these: in-place variants, and the backwards of convolutions and attentions, count too.
PRODUCTS = tuple(
    "mm addmm bmm baddbmm addbmm mv addmv dot matmul linear convolution "  # noqa: SIM905  # one line to read
    "_grouped_mm _scaled_mm _scaled_dot_product".split()
)


class Products(TorchDispatchMode):
    """Counts what is executed, by phase; attention by its own name's beginning."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.phase, self.counts = "", Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(PRODUCTS):
            self.counts[self.phase] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def mark(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield


def products(rivals: dict[str, Contestant], settings: Settings) -> Iterator[Line]:
    counted: dict[str, float] = {}
    gradients: dict[str, list[Tensor]] = {}
    for name, rival in rivals.items():
        stage = llama_stage(settings.blocks, settings, settings.hidden)
        x, dy = tensors(stage, 1, min(settings.time, 32), settings)
        with Products() as counter:
            step(rival, stage, x, dy, counter.mark)
        counted[name] = counter.counts["B"] + counter.counts["W"]
        gradients[name] = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    yield Line(
        section="products", figure="products in B and W", values=counted, form=".0f", limit=counted["plain"]
    )
    off = {name: _difference(each, gradients["plain"]) for name, each in gradients.items()}
    exact = 8 * torch.finfo(getattr(torch, settings.dtype)).eps
    figure = "gradients off plain's, relative"
    yield Line(section="products", figure=figure, values=off, form=".0e", limit=exact)


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest, each parameter's relative to its largest gradient."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# ---------------------------------------------------------------- recompute


class Checkpointed(nn.Module):
    """Blocks, each inside a checkpoint; counts their forwards."""

    def __init__(self, blocks: nn.Sequential, how: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks, self.how = blocks, how
        self.forwards: Counter[nn.Module] = Counter()
        for block in blocks:
            block.register_forward_pre_hook(lambda module, _: self.forwards.update([module]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return x


def recompute(rivals: dict[str, Contestant], settings: Settings) -> Iterator[Line]:
    torchs = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    own = {name: checkpoint if name == "zbpp" else torchs for name in rivals}
    for figure, how in (
        ("zbpp.checkpoint; the others torch's", own),
        ("torch's checkpoint", dict.fromkeys(rivals, torchs)),
    ):
        forwards = {name: float(_forwards(rival, how[name], settings)) for name, rival in rivals.items()}
        yield Line(
            section="recompute", figure=f"forwards of a block: {figure}", values=forwards, form=".0f", limit=1
        )


def _forwards(rival: Contestant, how: Callable[..., Any], settings: Settings) -> int:
    stage = Checkpointed(llama_stage(settings.blocks, settings), how)
    in_f: Counter[nn.Module] = Counter()

    @contextmanager
    def mark(phase: str) -> Iterator[None]:
        yield
        if phase == "F":
            in_f.update(stage.forwards)

    step(rival, stage, *tensors(stage, 1, 4, settings), mark)
    return max((stage.forwards - in_f).values())


# ---------------------------------------------------------------- time

SPREAD = "spread of the rounds"
BUSY = 0.10  # a spread above it says that the machine did something else, too


class Times(NamedTuple):
    """Seconds of one step."""

    f: float
    b: float
    w: float


def timed(rival: Contestant, stage: nn.Module, x: Tensor, dy: Tensor, device: str) -> Times:
    found: list[float] = []
    # On the CPU with one thread everything runs in this one: its own time leaves out what others took.
    is_alone = not device.startswith("cuda") and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter

    @contextmanager
    def mark(phase: str) -> Iterator[None]:
        begin = clock()
        yield
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(clock() - begin)

    step(rival, stage, x, dy, mark)
    return Times(*found)


def interleaved(
    rivals: dict[str, Contestant],
    stage: nn.Module,
    x: Tensor,
    dy: Tensor,
    *,
    rounds: int,
    steps: int,
    device: str,
) -> dict[str, list[Times]]:
    """Each round's median time of a step.

    Within a round the contestants take turns, each time in another order, so that a slow moment
    hits all. A turn of several steps begins with one more, to warm up.
    """
    for rival in rivals.values():
        step(rival, stage, x, dy)
    found: dict[str, list[Times]] = {name: [] for name in rivals}
    names = list(rivals)
    for number in range(rounds):
        turn = number % len(names)
        with without_garbage_collection():
            for name in (*names[turn:], *names[:turn]):
                if steps > 1:
                    step(rivals[name], stage, x, dy)
                times = [timed(rivals[name], stage, x, dy, device) for _ in range(steps)]
                found[name].append(Times(*map(statistics.median, zip(*times, strict=True))))
    return found


def ratios(found: dict[str, list[Times]], part: Callable[[Times], float]) -> tuple[dict[str, float], float]:
    """Each one's median ratio to plain of the same round, and how uncertain zbpp's is.

    That is the notch of a box plot, about the 95 % interval of a median.
    """
    by_round = {
        name: [part(ours) / part(plain) for ours, plain in zip(times, found["plain"], strict=True)]
        for name, times in found.items()
    }
    ours = by_round["zbpp"]
    lower, _, upper = statistics.quantiles(ours, n=4) if len(ours) > 1 else (0.0, 0.0, 0.0)
    medians = {name: statistics.median(each) for name, each in by_round.items()}
    return medians, 1.57 * (upper - lower) / len(ours) ** 0.5


def spread(found: dict[str, list[Times]]) -> dict[str, float]:
    """The range of the middle half of the rounds, relative to their median."""
    whole = {name: [sum(times) for times in each] for name, each in found.items()}
    if len(whole["plain"]) < 2:
        return dict.fromkeys(whole, 0.0)
    quartiles = {name: statistics.quantiles(each, n=4) for name, each in whole.items()}
    return {name: (upper - lower) / middle for name, (lower, middle, upper) in quartiles.items()}


def _milliseconds(found: dict[str, list[Times]], part: Callable[[Times], float]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(map(part, times)) for name, times in found.items()}


def host(rivals: dict[str, Contestant], settings: Settings) -> Iterator[Line]:
    for depth in settings.depths:
        stage = llama_stage(depth, settings)
        x, dy = tensors(stage, 1, 4, settings)
        steps = max(2, 64 // depth)
        found = interleaved(rivals, stage, x, dy, rounds=settings.rounds, steps=steps, device=settings.device)
        blocks = f"{depth} block{'s' if depth > 1 else ''}"
        for place, phase in enumerate("FBW"):
            values = _milliseconds(found, itemgetter(place))
            yield Line(section="host", figure=f"{blocks}: {phase}, ms", values=values)
        yield Line(section="host", figure=f"{blocks}: {SPREAD}", values=spread(found), form=".0%")
        values, _ = ratios(found, lambda times: times.b + times.w)
        yield Line(section="host", figure=f"{blocks}: (B+W) / backward", values=values)
        values, _ = ratios(found, sum)
        yield Line(section="host", figure=f"{blocks}: (F+B+W) / (F+backward)", values=values, limit=1.15)


def compute(rivals: dict[str, Contestant], settings: Settings) -> Iterator[Line]:
    stage = llama_stage(settings.blocks, settings, settings.hidden)
    x, dy = tensors(stage, settings.batch, settings.time, settings)
    found = interleaved(rivals, stage, x, dy, rounds=settings.compute_rounds, steps=1, device=settings.device)
    for place, phase in enumerate("FBW"):
        yield Line(section="compute", figure=f"{phase}, ms", values=_milliseconds(found, itemgetter(place)))
    yield Line(section="compute", figure=SPREAD, values=spread(found), form=".0%")
    values, noise = ratios(found, lambda times: times.b + times.w)
    yield Line(section="compute", figure="(B+W) / backward", values=values, limit=1.0, noise=noise)


# ---------------------------------------------------------------- compiled


def compiled(_: dict[str, Contestant], settings: Settings) -> Iterator[Line]:
    rivals: dict[str, Contestant] = {"zbpp": Zbpp(), "compiled": Compiled()}
    stage = llama_stage(settings.blocks, settings, settings.hidden)
    x, dy = tensors(stage, settings.batch, settings.time, settings)
    for rival in rivals.values():
        step(rival, stage, x, dy)  # whatever is made once
    line = partial(Line, section="compiled", marked="compiled")
    level = {
        name: levels(partial(step, each, stage, x, dy), settings.device) for name, each in rivals.items()
    }
    eager = level["zbpp"]["F"].after
    for phase, limit in (("F", 1.0), ("B", 0.85)):
        values = {name: each[phase].after / eager for name, each in level.items()}
        yield line(figure=f"held after {phase} / zbpp's after F", values=values, limit=limit)
    values = {name: each["W"].after for name, each in level.items()}
    yield line(figure="left after W, bytes", values=values, form=".0f", limit=0)
    # The wider, the more of the time is in products and attention, which both call alike.
    for hidden, limit in ((settings.hidden // 2, 0.93), (settings.hidden, None)):
        stage = llama_stage(settings.blocks, settings, hidden)
        x, dy = tensors(stage, settings.batch, settings.time, settings)
        found = interleaved(
            rivals, stage, x, dy, rounds=settings.compute_rounds, steps=1, device=settings.device
        )
        yield from _beside_zbpp(line, found, f"compute, hidden {hidden}", {"F+B+W": (sum, limit)})
    stage = llama_stage(max(settings.depths), settings)
    x, dy = tensors(stage, 1, 4, settings)
    found = interleaved(rivals, stage, x, dy, rounds=settings.rounds, steps=2, device=settings.device)
    each_phase = {phase: (itemgetter(place), 1.0) for place, phase in enumerate("FBW")}
    yield from _beside_zbpp(line, found, f"host, {max(settings.depths)} blocks", each_phase)


def _beside_zbpp(
    line: Callable[..., Line],
    found: dict[str, list[Times]],
    what: str,
    parts: dict[str, tuple[Any, float | None]],
) -> Iterator[Line]:
    """For each part its time, and the median over rounds of its ratio to the eager split's."""
    for name, (part, limit) in parts.items():
        yield line(figure=f"{what}: {name}, ms", values=_milliseconds(found, part))
        values = {
            rival: statistics.median(part(a) / part(b) for a, b in zip(times, found["zbpp"], strict=True))
            for rival, times in found.items()
        }
        yield line(figure=f"{what}: {name} / zbpp's", values=values, limit=limit)


# ---------------------------------------------------------------- the command line

SECTIONS: dict[str, Callable[[dict[str, Contestant], Settings], Iterator[Line]]] = {
    "memory": memory,
    "products": products,
    "recompute": recompute,
    "host": host,
    "compute": compute,
    "compiled": compiled,
}


def machine(settings: Settings) -> dict[str, Any]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name() if settings.device.startswith("cuda") else _processor()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """Where Linux says what the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def measure(
    sections: Iterable[str], settings: Settings, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Line], list[str]]:
    """The lines of these sections, and remarks."""
    sections, lines = list(sections), []
    if "host" in sections:
        # First, since torch's split makes hooks, and from then on B looks for hooks at every site.
        lines += watched("host", {"plain": Plain(), "zbpp": Zbpp()}, settings, say)
    rivals, remarks = contestants(settings)
    for section in sections:
        found = watched(section, rivals, settings, say)
        if section == "host":
            found = [replace(line, figure=f"{line.figure}, with hooks", limit=None) for line in found]
        lines += found
    if any(SPREAD in line.figure and line.values["plain"] > BUSY for line in lines):
        remarks.append(
            "BUSY MACHINE: plain backward's own time varied; repeat this before relying on the ratios"
        )
    return lines, remarks


def watched(
    section: str, rivals: dict[str, Contestant], settings: Settings, say: Callable[[str], None]
) -> list[Line]:
    """A section's lines, announcing each."""
    say(section)
    lines = []
    for line in SECTIONS[section](rivals, settings):
        lines.append(line)
        say(f"{section}: {line.figure}")
    return lines


def table(lines: list[Line], about: dict[str, Any], settings: Settings, remarks: list[str]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line.values))
    head = ["", "", *names, "mark", ""]
    body = [
        [
            line.section,
            line.figure,
            *(f"{line.values[name]:{line.form}}" if name in line.values else "–" for name in names),
            line.mark,
            {None: "", True: "met", False: "MISSED"}[line.met],
        ]
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    right = range(2, 2 + len(names))
    rows = [
        "  ".join(
            f"{cell:>{w}}" if i in right else f"{cell:<{w}}" for i, (cell, w) in enumerate(pairs)
        ).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in (head, *body))
    ]
    sizes = (
        f"{settings.blocks} blocks of hidden {settings.hidden}, x {settings.batch} x {settings.time} tokens"
    )
    title = (
        f"{about['device']}, {about['threads']} of {about['cores']} cores, {about['system']}; "
        f"torch {about['torch']}, Python {about['python']}; {settings.dtype}; load {about['load_average']}"
    )
    what = f"memory, compute: {sizes}; host, recompute: hidden {settings.tiny}, x 1 x 4 tokens"
    return "\n".join([title, what, *remarks, "", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a mark was missed."""
    options = parse(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("error: --device cuda, but this torch sees no GPU: write --device cpu")
    torch.set_num_threads(options.threads)
    settings = Settings(
        **{name: getattr(options, name) for name in Settings.__dataclass_fields__ if name != "depths"},
        depths=tuple(options.depths),
    )
    usual = [name for name in SECTIONS if name != "compiled"]
    with Console(stderr=True).status("") as status:
        about = machine(settings)
        lines, remarks = measure(options.sections or usual, settings, lambda text: status.update(text))
    print(table(lines, about, settings, remarks))
    if options.json is not None:
        found = {
            "machine": about,
            "settings": asdict(settings),
            "remarks": remarks,
            "lines": [{**asdict(line), "mark": line.mark} for line in lines],
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(line.met is False for line in lines))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; by default all but the last"
    )
    parser.add_argument("--device", default=default.device, help="cpu or cuda")
    parser.add_argument("--dtype", default=default.dtype, choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    for name, text in (
        ("hidden", "of the stages for memory and compute"),
        ("batch", "rows of x there"),
        ("time", "tokens of a row there"),
        ("blocks", "there"),
        ("tiny", "hidden size for host time"),
        ("rounds", "of host time"),
        ("compute_rounds", "of compute time"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=int, default=getattr(default, name), help=f"{text}; {getattr(default, name)}"
        )
    parser.add_argument("--depths", type=int, nargs="+", default=default.depths, help="blocks for host time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same as JSON")
    options = parser.parse_args(arguments)
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"section {name!r} does not exist: write some of {', '.join(SECTIONS)}")
    for name in ("threads", "hidden", "batch", "time", "blocks", "tiny", "rounds", "compute_rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: write 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
