#!/usr/bin/env python
"""The split backward beside plain backward and torch's own split, on blocks of a Llama, in one process.

    python scripts/bench_split.py                        # all sections, on the CPU: about two minutes
    python scripts/bench_split.py memory --compiled      # with one more column: F, B and W by Inductor
    python scripts/bench_split.py --device cuda --dtype bfloat16 --hidden 2048 --batch 8 --time 2048

    host     times of F, B and W on 1, 8 and 32 blocks so small that the host's work is all there is
    memory   live bytes after F, in B, after B and after W, when nothing may be left
    compute  times of F, B and W on blocks of a usual size

Columns: plain (torch.autograd.backward, whose W is empty), zbpp, torch (the split of
torch.distributed.pipelining), compiled (zbpp's split of a compiled stage). A time is the median over rounds
in which the columns take turns, a ratio the median of each round's own ratio to plain backward.
Host times are taken twice: torch's split registers tensor hooks, and once a process has tensor hooks, zbpp's
B looks for them at every site. The exit status is 1 if zbpp misses a mark. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.autograd import backward_input
from zbpp.autograd.compiled import compile_stage
from zbpp.autograd.compiled.inductor import Backend
from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.measure.live_tensors import Level, counter_of
from zbpp.models.llama import Llama
from zbpp.training.measured_steps import machine

MIB = 2**20
BUSY = 0.10  # plain backward's spread above it: other work ran on the machine


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """hidden, batch, time (tokens of a row), blocks: of the stage for memory and compute.

    tiny: the hidden size of the stages for host time, which have `depths` blocks.
    """

    device: str = "cpu"
    dtype: str = "float32"
    hidden: int = 512
    batch: int = 4
    time: int = 256
    blocks: int = 4
    tiny: int = 16
    depths: tuple[int, ...] = (1, 8, 32)
    rounds: int = 15


@dataclass
class Row:
    """A row. values: by column. limit: what zbpp's value must not exceed by more than `noise`."""

    section: str
    figure: str
    values: dict[str, float]
    form: str = ".2f"
    limit: float | None = None
    noise: float = 0.0

    @property
    def is_met(self) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        return None if self.limit is None else self.values["zbpp"] - self.noise <= self.limit


# ---------------------------------------------------------------- the columns


class Column(Protocol):
    """F, B and W of one stage.

    enter(x): x as the stage takes it, with a gradient. b: runs B, and returns what is kept for W.
    """

    def enter(self, x: Tensor) -> Tensor: ...
    def f(self, stage: nn.Module, x: Tensor) -> Tensor: ...
    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any: ...
    def w(self, stage: nn.Module, kept: Any) -> None: ...


class Plain:
    """torch.autograd.backward."""

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_()

    def f(self, stage: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = stage(x)
        return y

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        torch.autograd.backward([y], [dy])

    def w(self, stage: nn.Module, kept: Any) -> None:
        pass


class Zbpp(Plain):
    """zbpp's split."""

    def enter(self, x: Tensor) -> Tensor:
        return x.requires_grad_().view_as(x)  # no leaf, as in zbpp's runtime

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        _, weight_grads = backward_input(y, dy, x)
        return weight_grads

    def w(self, stage: nn.Module, kept: Any) -> None:
        kept.accumulate()


class Compiled(Zbpp):
    """zbpp's split of a compiled stage. The stage itself stays eager for the other columns."""

    def __init__(self, backend: Backend = "inductor") -> None:
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._backend = backend

    def f(self, stage: nn.Module, x: Tensor) -> Tensor:
        if stage in self._forwards:
            return self._forwards[stage](x)
        compile_stage(stage, backend=self._backend)
        y: Tensor = stage(x)
        self._forwards[stage] = stage.forward
        del stage.forward
        return y


class Torch(Plain):
    """torch's split: calls and keeps what torch.distributed.pipelining.stage.backward_one_chunk does."""

    def __init__(self) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        self._input, self._weight = stage_backward_input, stage_backward_weight

    def b(self, stage: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Any:
        _, groups = self._input([y], [dy], [x], stage.parameters())
        return [x], groups, (y,), (dy,)

    def w(self, stage: nn.Module, kept: Any) -> None:
        self._weight(stage.parameters(), kept[1])


def usable_columns(sizes: Sizes) -> tuple[dict[str, Column], list[str]]:
    """The columns by name, and a remark if torch's private functions can't be used."""
    columns: dict[str, Column] = {"plain": Plain(), "zbpp": Zbpp()}
    try:
        torchs = Torch()
        stage = llama_stage(1, sizes.tiny, sizes)
        run_step(torchs, stage, *x_and_dy(stage, 1, 2, sizes))
    except Exception as error:  # a private function that has changed may raise anything
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        return columns, [f"torch {torch.__version__}: its stage_backward_input can't be used ({problem})"]
    return {**columns, "torch": torchs}, []


# ---------------------------------------------------------------- a stage and a microbatch


def llama_stage(blocks: int, hidden: int, sizes: Sizes) -> nn.Sequential:
    """Blocks from the middle of a Llama, whose parameters have a .grad."""
    model = Llama(
        num_layers=blocks + 2,
        layers_per_stage=(1, blocks, 1),
        hidden_size=hidden,
        num_heads=max(1, hidden // 64),
        intermediate_size=None if hidden >= 64 else hidden,
        sequence_length=sizes.time,
    )
    stage = model.build_stage(1, 3).to(sizes.device, getattr(torch, sizes.dtype))
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage


def x_and_dy(stage: nn.Module, batch: int, time: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """An input of the stage and a gradient of its output, [batch, time, hidden], the same in every call."""
    hidden = next(parameter for parameter in stage.parameters() if parameter.dim() == 2).shape[1]
    drawn = torch.randn(2, batch, time, hidden, generator=torch.Generator().manual_seed(0))
    x, dy = drawn.to(sizes.device, getattr(torch, sizes.dtype)).unbind()
    return x, dy


def phases(column: Column, stage: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Callable[[], None]]:
    """F, B and W of one microbatch, to be called in this order."""
    forward: list[tuple[Tensor, Tensor]] = []  # input and output, between F and B
    kept: list[Any] = []  # between B and W

    def f() -> None:
        arrived = column.enter(x.clone())  # a copy: each microbatch has an input of its own
        forward.append((arrived, column.f(stage, arrived)))

    def b() -> None:
        arrived, y = forward.pop()
        kept.append(column.b(stage, arrived, y, dy.clone()))

    def w() -> None:
        column.w(stage, kept.pop())

    return {"F": f, "B": b, "W": w}


def run_step(column: Column, stage: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Run one microbatch."""
    for run in phases(column, stage, x, dy).values():
        run()


# ---------------------------------------------------------------- live bytes


def live_levels(column: Column, stage: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Level]:
    """The live bytes of each phase, over those before the first."""
    run_step(column, stage, x, dy)  # allocates what stays from then on
    found: dict[str, Level] = {}
    # One counter for all phases: a tensor from before a counter is not counted when it is freed.
    with without_garbage_collection(), counter_of(x.device) as counter:
        before = counter.mark()
        for phase, run in phases(column, stage, x, dy).items():
            counter.mark()
            run()
            found[phase] = Level(counter.highest - before, counter.now - before)
    return found


def memory_rows(columns: Mapping[str, Column], stage: nn.Module, x: Tensor, dy: Tensor) -> Iterator[Row]:
    """What each column holds of one microbatch."""
    found = {name: live_levels(column, stage, x, dy) for name, column in columns.items()}

    def row(figure: str, value: Callable[[dict[str, Level]], float], **more: Any) -> Row:
        values = {name: value(levels) for name, levels in found.items()}
        return Row(section="memory", figure=figure, values=values, **more)

    plain = found["plain"]["B"].highest
    arrived = x.clone().requires_grad_()
    held = backward_input(stage(arrived), dy, arrived)[1].held_bytes / MIB  # what W needs
    yield row("after F, MiB", lambda levels: levels["F"].after / MIB, form=".1f")
    yield row("highest in B, MiB", lambda levels: levels["B"].highest / MIB, form=".1f")
    yield row(
        "highest in B above plain's, MiB",
        lambda levels: (levels["B"].highest - plain) / MIB,
        form=".1f",
        limit=held,
    )
    yield row("after B, MiB", lambda levels: levels["B"].after / MIB, form=".1f")
    yield row("after B / after F", lambda levels: levels["B"].after / levels["F"].after, limit=0.85)
    yield row("left after W, bytes", lambda levels: levels["W"].after, form=".0f", limit=0)


# ---------------------------------------------------------------- times


class Times(NamedTuple):
    """Seconds of F, B and W."""

    f: float
    b: float
    w: float


Rounds = dict[str, list[Times]]
"""For each column, its median times of each round."""


def timed(column: Column, stage: nn.Module, x: Tensor, dy: Tensor) -> Times:
    """The times of one microbatch, each phase until the device has done it."""
    # With one thread on the CPU, this thread does all the work. Its own clock does not count other processes.
    clock = time.thread_time if torch.get_num_threads() == 1 and not x.is_cuda else time.perf_counter
    found: list[float] = []
    for run in phases(column, stage, x, dy).values():
        begin = clock()
        run()
        if x.is_cuda:
            torch.cuda.synchronize()
        found.append(clock() - begin)
    return Times(*found)


def timed_in_turns(
    columns: Mapping[str, Column], stage: nn.Module, x: Tensor, dy: Tensor, *, rounds: int, steps: int = 1
) -> Rounds:
    """Each column's times, round by round; another column begins each round.

    A turn of several steps begins with one more, to warm up.
    """
    for column in columns.values():
        run_step(column, stage, x, dy)
    found: Rounds = {name: [] for name in columns}
    names = list(columns)
    for number in range(rounds):
        first = number % len(names)
        with without_garbage_collection():
            for name in (*names[first:], *names[:first]):
                if steps > 1:
                    run_step(columns[name], stage, x, dy)
                times = [timed(columns[name], stage, x, dy) for _ in range(steps)]
                found[name].append(Times(*map(statistics.median, zip(*times, strict=True))))
    return found


def time_rows(
    section: str, found: Rounds, what: str = "", limits: Sequence[float | None] = ()
) -> Iterator[Row]:
    """Times, their spread, and ratios to plain backward. limits: of (B+W) / backward and of the whole."""
    for place, phase in enumerate("FBW"):
        values = {
            name: 1e3 * statistics.median(each[place] for each in times) for name, times in found.items()
        }
        yield Row(section=section, figure=f"{what}{phase}, ms", values=values)
    yield Row(section=section, figure=f"{what}spread of the rounds", values=_spread(found), form=".0%")
    backward, whole = limits or (None, None)
    parts: list[tuple[str, Callable[[Times], float], float | None]] = [
        ("(B+W) / backward", lambda times: times.b + times.w, backward),
        ("(F+B+W) / (F+backward)", sum, whole),
    ]
    for figure, part, limit in parts:
        values, noise = _ratios(found, part)
        yield Row(section=section, figure=what + figure, values=values, limit=limit, noise=noise)


def _ratios(found: Rounds, part: Callable[[Times], float]) -> tuple[dict[str, float], float]:
    """Each column's median ratio to plain backward of the same round, and the uncertainty of zbpp's.

    The uncertainty is 1.57 IQR / sqrt(n), about half of the 95 % interval of the median (the notch of a box
    plot; IQR: upper less lower quartile).
    """
    by_round = {
        name: [part(ours) / part(plain) for ours, plain in zip(times, found["plain"], strict=True)]
        for name, times in found.items()
    }
    ours = by_round["zbpp"]
    lower, _, upper = statistics.quantiles(ours, n=4) if len(ours) > 1 else (0.0, 0.0, 0.0)
    medians = {name: statistics.median(each) for name, each in by_round.items()}
    return medians, 1.57 * (upper - lower) / len(ours) ** 0.5


def _spread(found: Rounds) -> dict[str, float]:
    """The range of the middle half of the rounds, relative to their median."""
    spreads = {}
    for name, times in found.items():
        whole = [sum(each) for each in times]
        lower, middle, upper = statistics.quantiles(whole, n=4) if len(whole) > 1 else (0.0, 1.0, 0.0)
        spreads[name] = (upper - lower) / middle
    return spreads


# ---------------------------------------------------------------- the sections


def host(columns: Mapping[str, Column], sizes: Sizes, section: str = "host") -> Iterator[Row]:
    for depth in sizes.depths:
        stage = llama_stage(depth, sizes.tiny, sizes)
        steps = max(2, 64 // depth)
        found = timed_in_turns(
            columns, stage, *x_and_dy(stage, 1, 4, sizes), rounds=sizes.rounds, steps=steps
        )
        limits = (None, 1.15) if section == "host" else ()
        yield from time_rows(section, found, f"{depth} block{'s' if depth > 1 else ''}: ", limits)


def memory(columns: Mapping[str, Column], sizes: Sizes) -> Iterator[Row]:
    stage = llama_stage(sizes.blocks, sizes.hidden, sizes)
    yield from memory_rows(columns, stage, *x_and_dy(stage, sizes.batch, sizes.time, sizes))


def compute(columns: Mapping[str, Column], sizes: Sizes) -> Iterator[Row]:
    stage = llama_stage(sizes.blocks, sizes.hidden, sizes)
    x, dy = x_and_dy(stage, sizes.batch, sizes.time, sizes)
    yield from time_rows(
        "compute", timed_in_turns(columns, stage, x, dy, rounds=sizes.rounds), limits=(1.0, None)
    )


SECTIONS = {"host": host, "memory": memory, "compute": compute}


def measure(names: Sequence[str], sizes: Sizes, *, is_compiled: bool = False) -> Iterator[Row | str]:
    """The rows of these sections, and remarks in between."""
    own: dict[str, Column] = {"plain": Plain(), "zbpp": Zbpp()}
    own |= {"compiled": Compiled()} if is_compiled else {}
    if "host" in names:
        yield from host(own, sizes)
    columns, remarks = usable_columns(sizes)
    columns |= own
    yield from remarks
    for name in names:
        found = host(columns, sizes, "host, with hooks") if name == "host" else SECTIONS[name](columns, sizes)
        for row in found:
            yield row
            if "spread" in row.figure and row.values["plain"] > BUSY:
                yield "BUSY MACHINE: plain backward's own time varied; repeat this before you rely on it"


def text_of(row: Row) -> str:
    """`memory  after B / after F    plain 0.00  zbpp 0.73  torch 1.57   <= 0.85 met`."""
    values = "".join(f"{f'{name} {value:{row.form}}':>18}" for name, value in row.values.items())
    if row.limit is None:
        return f"{row.section:<17}{row.figure:<34}{values}"
    noise = f" ± {row.noise:.2f}" if row.noise else ""
    verdict = "met" if row.is_met else "MISSED"
    return f"{row.section:<17}{row.figure:<34}{values}   <= {row.limit:{row.form}}{noise} {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit status 1 if a mark was missed."""
    options = vars(parse(arguments))
    names, threads, is_compiled = options.pop("sections"), options.pop("threads"), options.pop("compiled")
    sizes = Sizes(**options | {"depths": tuple(options["depths"])})
    if sizes.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("error: --device cuda, but this torch sees no GPU: write --device cpu")
    torch.set_num_threads(threads)
    print(
        machine(torch.device(sizes.device)),
        f"threads {threads}, load {os.getloadavg()[0]:.2f}",
        sizes,
        sep="\n",
    )
    is_missed = False
    for found in measure(names or [*SECTIONS], sizes, is_compiled=is_compiled):
        print(found if isinstance(found, str) else text_of(found), flush=True)
        is_missed |= isinstance(found, Row) and found.is_met is False
    return int(is_missed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; an option per size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument("--compiled", action="store_true", help="a column for the compiled stage")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; default 1")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--depths", type=int, nargs="+", default=Sizes.depths, help="blocks for host time")
    counts = [each.name for each in fields(Sizes) if isinstance(each.default, int)]
    for name in counts:
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name), help="default %(default)s")
    options = parser.parse_args(arguments)
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"section {name!r} does not exist: write some of {', '.join(SECTIONS)}")
    for name in ("threads", *counts):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: write 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
