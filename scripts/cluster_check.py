#!/usr/bin/env python
"""What zbpp does on a cluster of GPUs under torchrun and NCCL, in one table to send back.

    torchrun --nproc-per-node 8 scripts/cluster_check.py                 # the GPUs of this machine
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-1:29600 \
        scripts/cluster_check.py                                         # the same line on each of four nodes
    torchrun --nproc-per-node 2 scripts/cluster_check.py --device cpu --small    # tries the check itself

    schedules  all schedules over all ranks: their losses beside plain autograd's, in float64
    meshes     the same with replicas, shards and tensor parallelism
    hang       the last rank stops inside a step: is it named within the timeout?

Rank 0 prints each row as soon as the row is known, and writes it to OUT/cluster.txt, so a job that dies
leaves the earlier rows. A row that raises is FAILED, and the check goes on. Exit status: 1 if one failed.
How fast steps are, `scripts/bench.py` under torchrun says; how fast links are, nccl-tests' sendrecv_perf.
NOT RUN ON A GPU YET: with gloo on CPUs the same code runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from zbpp.job.agreement import broadcast, gather
from zbpp.job.world import World, world
from zbpp.models.gpt import Gpt
from zbpp.planning import SCHEDULES, plan
from zbpp.render import render_hang
from zbpp.runtime import FlightRecorder, Pipeline
from zbpp.runtime.parallel.mesh import DIMENSIONS, Place, make_mesh, planned_by_rank_0
from zbpp.runtime.parallel.tensor_parallel import parallelize
from zbpp.schedule import PlanError, Timetable

STEPS, RATE, TOLERANCE = 2, 0.5, 1e-11  # of the small model: steps, SGD's learning rate, relative difference
SPARE = 15.0  # s beyond the timeout in which a stopped rank has to be named
DEGREES: tuple[dict[str, int], ...] = (
    {"replicate": 2},
    {"shard": 2},
    {"tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "shard": 2},
    {"replicate": 2, "shard": 2, "tensor": 2},
    {"tensor": 8},
)
Row = tuple[str, Callable[[], str]]  # its name; a collective that returns what was found, or raises
Rows = Iterator[Row]


@dataclass(frozen=True)
class Timeouts:
    """waiting: s that a rank waits for another; hanging: the same in part hang."""

    waiting: float = 180.0
    hanging: float = 30.0


# ---------------------------------------------------------------- parts schedules and meshes


def schedules(timeouts: Timeouts, here: World) -> Rows:
    """A row for each schedule, on one pipeline over all ranks."""
    yield from _trained([(name, {}, name) for name in SCHEDULES], timeouts, here)


def meshes(timeouts: Timeouts, here: World) -> Rows:
    """A row for each composition that the number of ranks allows."""
    cases = []
    for degrees in DEGREES:
        if here.size % math.prod(degrees.values()) == 0:
            whole = {"pipeline": here.size // math.prod(degrees.values()), **degrees}
            text = " x ".join(f"{name} {whole[name]}" for name in DIMENSIONS if name in whole)
            cases += [(f"{text}, {name}", degrees, name) for name in ("zb_h1", "zb_v")]
    yield from _trained(cases, timeouts, here)


def _trained(cases: Sequence[tuple[str, Mapping[str, int], str]], timeouts: Timeouts, here: World) -> Rows:
    """A row for each (what it is called, degrees of the mesh, schedule)."""
    num_microbatches = max(4, 2 * here.size)
    expected = plain_losses(2 * here.size, num_microbatches, here.rank)

    def row(degrees: Mapping[str, int], name: str) -> str:
        num_ranks = here.size // math.prod(degrees.values())
        try:
            timetable = planned_by_rank_0(lambda: plan(name, num_ranks, num_microbatches, time_limit=5.0))
        except PlanError as error:
            return f"not with {num_ranks} ranks: {error}"
        return compared(pipeline_losses(2 * here.size, timetable, here, timeouts.waiting, degrees), expected)

    for text, degrees, name in cases:
        yield text, partial(row, degrees, name)


def small_gpt(num_layers: int) -> Gpt:
    return Gpt(vocab_size=64, num_layers=num_layers, hidden_size=32, num_heads=8, sequence_length=8)


def tokens(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of a whole step: four rows per microbatch, divisible among replicas and shards."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(64, (4 * num_microbatches, 9), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def plain_losses(num_layers: int, num_microbatches: int, rank: int) -> list[float]:
    """The losses of plain autograd in one process, computed on rank 0. Collective.

    The second step's depends on the gradients of the first: an update with plain SGD stands between them.
    """
    losses = []
    if rank == 0:
        model = small_gpt(num_layers)
        whole = model.build_stage(0, 1).double()
        optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
        for step in range(STEPS):
            inputs, target = tokens(step, num_microbatches)
            loss = model.loss(whole(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    found: list[float] = broadcast(losses)
    return found


def pipeline_losses(
    num_layers: int, timetable: Timetable, here: World, timeout: float, degrees: Mapping[str, int]
) -> list[float]:
    """The loss of each step under a pipeline, the mean over all data. Collective."""
    model = small_gpt(num_layers)
    mesh = make_mesh(**degrees, device_type=here.device.type) if degrees else None
    rank = here.rank if mesh is None else Place(mesh).rank
    stages: dict[int, nn.Module] = {
        index: model.build_stage(index, timetable.num_stages).to(here.device, torch.float64)
        for index in timetable.stages_of(rank)
    }
    parallelize(model, stages, mesh)
    losses = []
    with Pipeline(stages, timetable, model.loss, mesh=mesh, timeout=timeout) as pipeline:
        place = pipeline.place
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE)
        for step in range(STEPS):
            batch = tokens(step, timetable.num_microbatches)
            inputs, target = (
                each.chunk(place.num_data_parts)[place.data_part].to(here.device) for each in batch
            )
            args = (inputs,) if 0 in stages else ()
            has_loss = timetable.num_stages - 1 in stages
            mine = [each.item() for each in pipeline.step(*args, target=target if has_loss else None)]
            optimizer.step()
            optimizer.zero_grad()
            parts = [sum(each) / len(each) for each in place.gather(mine) if each]
            losses.append(sum(parts) / len(parts))
    return losses


def compared(losses: Sequence[float], expected: Sequence[float]) -> str:
    """Says that losses are the expected ones. Raises ValueError if they differ by more than rounding."""
    pairs = zip(losses, expected, strict=True)
    difference = max(abs(one - other) / abs(other) for one, other in pairs)
    if not difference <= TOLERANCE:
        raise ValueError(f"losses {losses} differ from plain autograd's {list(expected)} by {difference:.1e}")
    return f"losses as plain autograd's (differ by {difference:.0e})"


# ---------------------------------------------------------------- part hang


class _Stops(nn.Linear):
    """A linear layer whose forward stops until a time on the clock, and then ends the process."""

    until = 0.0

    def forward(self, x: Tensor) -> Tensor:
        while self.until:
            time.sleep(0.5)
            if time.time() > self.until:
                os._exit(0)
        return super().forward(x)


def hang(timeouts: Timeouts, here: World, folder: Path) -> str:
    """Let the last rank stop in its second step; then the first one reads who is to blame.

    No collective can follow. On NCCL torch may end the processes first: `zbpp hang FOLDER` reads the records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stage, victim = _Stops(8, 8).to(here.device), here.size - 1
    timetable = plan("zb_h1", here.size, 2 * here.size)
    recorder = FlightRecorder(folder)
    pipeline = Pipeline(
        {here.rank: stage}, timetable, nn.functional.mse_loss, timeout=timeouts.hanging, extras=[recorder]
    )
    batch = torch.randn(2 * here.size, 8, device=here.device)
    begin = time.time()
    try:
        for step in range(2):
            begin = time.time()
            stage.until = begin + timeouts.hanging + SPARE if step == 1 and here.rank == victim else 0.0
            losses = pipeline.step(batch, target=batch)
            assert all(each.isfinite() for each in losses)  # waits for the device
    except Exception:  # what is raised differs; the records say who is to blame
        time.sleep(min(5.0, SPARE))  # the others leave their records
    records = [json.loads(path.read_text()) for path in folder.glob("flight-*.json")]
    said = (
        render_hang({each["process"]: each for each in records}).partition("\n")[0]
        if records
        else "no record"
    )
    if f"rank {victim} is behind" not in said:
        raise RuntimeError(f"rank {victim} stopped, and nothing names it: {said}")
    after = min(float(each["written"]) for each in records) - begin
    if after > timeouts.hanging + SPARE:
        raise RuntimeError(f"rank {victim} was named only after {after:.1f} s")
    return f"rank {victim} stopped and was named after {after:.1f} s (timeout {timeouts.hanging:g} s)"


# ---------------------------------------------------------------- the table


PARTS = {"schedules": schedules, "meshes": meshes}


class Table:
    """Rows on standard output and in a file, written by rank 0 alone."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.num_failed = path, 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def write(self, text: str) -> None:
        if self._path is not None:
            print(text, flush=True)
            with self._path.open("a") as file:
                print(text, file=file)

    def row(self, part: str, name: str, found: Callable[[], str], *, is_alone: bool = False) -> None:
        """Write what `found` returns, or FAILED and why. Collective, unless it is alone."""
        begin, problem, text = time.perf_counter(), "", ""
        try:
            text = found()
        except Exception as error:  # whatever it is belongs into the table
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        problems = [problem] if is_alone else gather(problem)
        for rank, each in enumerate(problems):
            if each:
                text = f"FAILED: rank {rank}: {each}"
        self.num_failed += any(problems)
        first, *more = text.splitlines()
        self.write(f"{part:<10}{name:<44}{time.perf_counter() - begin:6.1f} s  {first}")
        for line in more:
            self.write(f"{'':<64}{line}")


def check(parts: Sequence[str], timeouts: Timeouts, here: World, out: Path) -> int:
    """Run the parts on all ranks; the exit status."""
    table = Table(out / "cluster.txt" if here.rank == 0 else None)
    for line in machines(here):
        table.write(line)
    for part in parts:
        if part != "hang":
            for name, found in PARTS[part](timeouts, here):
                table.row(part, name, found)
    if "hang" in parts and here.size > 1:
        # Nothing can be exchanged after it: ranks end by themselves, without an error for torchrun.
        table.row("hang", "a rank stops", lambda: hang(timeouts, here, out / "hang"), is_alone=True)
    table.write(f"{table.num_failed or 'none'} FAILED")
    status = int(table.num_failed > 0)
    if "hang" in parts and here.size > 1:
        time.sleep(0 if here.rank == 0 else 1)  # else torchrun would end rank 0 before its last line
        os._exit(status if here.rank == 0 else 0)
    return status


def machines(here: World) -> list[str]:
    """Software and nodes. Collective."""
    backend, device = "gloo", "CPU"
    if here.device.type == "cuda":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}"
        gpu = torch.cuda.get_device_properties(here.device)
        device = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    found = gather((socket.gethostname(), device))
    lines = [f"{here.size} ranks, torch {torch.__version__}, {backend}"]
    for each in dict.fromkeys(found):
        ranks = [rank for rank, place in enumerate(found) if place == each]
        lines.append(f"{each[0]}: ranks {ranks[0]}-{ranks[-1]}, {each[1]}")
    if len({device for _, device in found}) > 1:
        lines.append(
            "The GPUs differ: give slower ones fewer layers (model.layers_per_stage), or schedule=auto"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PARTS, "hang"]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; by default all")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if any"
    )
    parser.add_argument("--small", action="store_true", help="short timeouts, to try the check itself")
    parser.add_argument(
        "--timeout", type=float, help=f"s that a rank waits for another; default {Timeouts.waiting:g}"
    )
    parser.add_argument("--out", type=Path, default=Path("cluster_check"), help="folder of the results")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in names:
            parser.error(f"part {name!r} does not exist: write some of {', '.join(names)}")
    if "RANK" not in os.environ:
        parser.error("no torchrun: write torchrun --nproc-per-node 2 scripts/cluster_check.py ...")
    timeouts = Timeouts(60.0, 4.0) if options.small else Timeouts()
    if options.timeout is not None:
        timeouts = replace(timeouts, waiting=options.timeout)
    with world(device=options.device, timeout=timeouts.waiting) as here:
        return check(options.parts or names, timeouts, here, options.out)


if __name__ == "__main__":
    sys.exit(main())
