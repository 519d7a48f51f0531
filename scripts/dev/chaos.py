#!/usr/bin/env python
"""Train under faults, and compare the curve with that of a run without any.

    python scripts/dev/chaos.py                                # one run with each kind of fault once
    python scripts/dev/chaos.py --num-faults 100 --seed 1
    python scripts/dev/chaos.py --faults SIGKILL "exception in B"

A fault ends the job, or corrupts its files; the same command is started again and goes on (resume=auto).
Each job must end in time, with no process left, and name the cause. At the end the losses and norms of all
steps must be equal, to the last bit, to those of the run without faults.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from faults import KINDS, Job, Kind, warm_python

from zbpp.checkpoints.folders import check_sizes, checkpoints_in, step_of
from zbpp.commands import hang
from zbpp.render.table import aligned

STEPS, EVERY, NUM_MICROBATCHES = 40, 4, 4  # of each fault; between checkpoints
SECONDS = 0.002  # of each F
GRACE = 5.0  # s beside the timeout in which a fault must be noticed
OF_TORCHELASTIC = 35.0  # s more, where a rank ends by SIGKILL only: torchelastic waits 30 s after its SIGTERM

Curve = list[tuple[Any, ...]]
"""(step, loss, norm) of each step."""


@dataclass(frozen=True)
class Setting:
    """What all jobs share. warm, real: the folders of the commands, see `Job`."""

    warm: Path
    real: Path
    num_ranks: int
    timeout: float
    steps: int

    def job(self, folder: Path, *, is_real: bool = False, misbehave: Any = None, **options: Any) -> Job:
        """Start a run. misbehave: how its own code does, see misbehave.py."""
        arguments = [
            "model._target_=misbehave.Model", "data._target_=misbehave.data", "schedule=zb_h1",
            f"num_microbatches={NUM_MICROBATCHES}", "microbatch_size=2", f"steps={self.steps}",
            "run_dir=run", f"checkpoint.every={EVERY}", "evaluate_every=0",
            "measure_every=0", "save_weights=false",
            "print_every=1000", "parallel.device=cpu", f"parallel.timeout={self.timeout}",
        ]  # fmt: skip
        plan = json.dumps(misbehave or {})
        environment = {"MISBEHAVE": plan, "MISBEHAVE_SLEEP": str(SECONDS)}
        commands = self.real if is_real else self.warm
        job = Job(folder, commands, self.num_ranks, arguments, environment=environment, **options)
        job.misbehave = plan
        return job

    def end(self, folder: Path, name: str) -> Curve:
        """Let a run come to its end; its curve. Raises RuntimeError if it does not."""
        job = self.job(folder, name=name)
        gone = job.wait(60 + 2 * self.steps)
        job.kill()
        if gone is None or job.process.returncode:
            raise RuntimeError(f"the run does not end:\n{job.text()[-6000:]}")
        return curve_of(folder / "run")


@dataclass
class Event:
    """A fault behind a step.

    gone_after: s until no process was left. told: what `zbpp hang` says. problems: what must not be.
    """

    second: float
    fault: str
    where: str
    gone_after: float | None
    status: int | None
    goes_on_from: int
    told: str
    problems: list[str]

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        gone = "never" if self.gone_after is None else f"{self.gone_after:.1f}"
        return f"{self.second:.0f}", self.fault, self.where, gone, str(self.status), str(self.goes_on_from)


HEAD = ("s", "fault", "where", "all processes gone after, s", "exit status", "goes on from step")


def made(folder: Path) -> Path:
    """A folder for a run, with the code that its jobs import."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("misbehave.py"), folder)
    return folder


def reference(setting: Setting, folder: Path) -> Curve:
    """The curve of a run without a fault."""
    return setting.end(made(folder), "whole")


def drawn(
    num_faults: int, num_steps: int, seed: int, kinds: Sequence[str] = tuple(KINDS)
) -> list[tuple[int, str]]:
    """(step, fault) of each fault, by step. No kind comes twice before every kind has come."""
    rng, names = Random(seed), list[str]()
    while len(names) < num_faults:
        names += rng.sample(kinds, len(kinds))
    gap = num_steps // (num_faults + 1)
    return [
        (gap * (number + 1) + rng.randrange(max(1, gap // 2)), name)
        for number, name in enumerate(names[:num_faults])
    ]


def chaos(
    setting: Setting,
    faults: Sequence[tuple[int, str]],
    seed: int,
    folder: Path,
    whole: Curve,
    show: Callable[[Event], None] = lambda event: None,
) -> list[Event]:
    """Put the faults into a run, one after the other, then let it end, and compare its curve with `whole`."""
    made(folder)
    begin, rng, events = time.monotonic(), Random(seed), list[Event]()
    for number, (step, name) in enumerate(faults):
        events.append(_put_in(setting, number, step, name, folder, rng))
        events[-1].second = time.monotonic() - begin
        show(events[-1])
    events[-1].problems += difference(setting.end(folder, "last"), whole)
    said = [(folder / f"{name}.log").read_text(errors="replace") for name in (*range(len(faults)), "last")]
    for number, event in enumerate(events):
        # The job itself says some words, and the job that goes on says others.
        text = event.told + said[number] + said[number + 1]
        words = [each.replace("{last}", str(setting.num_ranks - 1)) for each in KINDS[event.fault].words]
        event.problems += [f"nobody says {word!r}" for word in words if not re.search(word, text)]
    return events


def _put_in(setting: Setting, number: int, step: int, name: str, folder: Path, rng: Random) -> Event:
    kind, run = KINDS[name], folder / "run"
    with suppress(FileNotFoundError):
        (folder / "fired").unlink()
    plan = plan_of(kind, step - newest_in(run), setting, rng)
    how = rng.choice(kind.hows)
    job = setting.job(folder, misbehave=plan, name=f"{number}", is_real=kind.is_real, how=how)
    limit = setting.timeout + GRACE + OF_TORCHELASTIC * kind.needs_sigkill
    try:
        injected = kind.inject(job, step, rng)
        gone = job.wait(limit + 40)
    finally:
        job.kill()
    after, status = None if gone is None else gone - injected.time, job.process.returncode
    kind.before_next(run, rng)
    told = said_by_hang(run)
    problems = []
    if after is None or after > limit:
        problems.append(f"{after} s, later than {limit:g} s")
    if (status == 0) != kind.leaves:
        problems.append(f"exit status {status}:\n{job.text()[-2000:]}")
    return Event(0.0, name, injected.where, after, status, newest_in(run), told, problems)


def plan_of(kind: Kind, step: int, setting: Setting, rng: Random) -> dict[str, Any]:
    """How the job's own code misbehaves, so many steps after its start; {} if it does not."""
    if not kind.misbehave:
        return {}
    last = setting.num_ranks - 1
    place = kind.misbehave["rank"]
    rank = {"any": rng.randrange(last + 1), "first": 0, "last": last, "not last": rng.randrange(last)}[place]
    per_step = 1 if kind.misbehave["where"] == "data" else NUM_MICROBATCHES
    return {**kind.misbehave, "rank": rank, "call": step * per_step + rng.randrange(per_step)}


def said_by_hang(run: Path) -> str:
    """What `zbpp hang` prints of the records that the ranks left; nothing without records."""
    if not (run / "failure").is_dir():
        return ""
    with redirect_stdout(io.StringIO()) as said:
        hang.main([str(run)])
    return said.getvalue()


def newest_in(run: Path) -> int:
    """The step of the newest whole checkpoint; 0 without one."""
    for path in checkpoints_in(run / "checkpoints"):
        try:
            check_sizes(path)
        except (ValueError, OSError):
            continue
        return step_of(path) or 0
    return 0


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; none if the file is not there."""
    found = []
    with suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def curve_of(run: Path) -> Curve:
    """Steps, losses and norms."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines_of(run)]


def difference(curve: Curve, whole: Curve) -> list[str]:
    """Nothing, or how the curve differs: each step must come once, equal to the last bit."""
    if curve == whole:
        return []
    same = sum(a == b for a, b in zip(curve, whole, strict=False))
    return [f"another curve: {len(curve)} lines, {same} of {len(whole)} equal"]


def report(setting: Setting, faults: Sequence[tuple[int, str]], seed: int) -> tuple[str, list[str]]:
    """(a table with a row for each fault, the problems)."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as made_here:
        folder = Path(made_here)
        whole, begin = reference(setting, folder / "whole"), time.monotonic()
        show = lambda event: print("  ".join(event.cells()), flush=True)  # noqa: E731
        events = chaos(setting, faults, seed, folder / "chaos", whole, show)
    problems = [f"{event.fault} {event.where}: {each}" for event in events for each in event.problems]
    lines = [
        f"{len(events)} faults (seed {seed}) in {(time.monotonic() - begin) / 60:.1f} minutes: "
        f"{setting.steps} steps on {setting.num_ranks} ranks, a checkpoint every {EVERY}, "
        f"parallel.timeout={setting.timeout:g}; torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
        "",
        *aligned([HEAD, *(event.cells() for event in events)]),
        "",
        *(problems or [f"each of {len(whole)} steps once, losses and norms equal to the last bit"]),
    ]
    return "\n".join(lines), problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--faults", nargs="*", default=[""], metavar="NAME", help="those whose name has this in it")
    add("--num-faults", type=int, help="default: each kind once")
    add("--seed", type=int, default=0)
    add("--ranks", type=int, default=3)
    add("--timeout", type=float, default=5.0, help="s: parallel.timeout")
    add("--result", type=Path, metavar="FILE", help="write what is printed there, too")
    options = parser.parse_args()
    kinds = [name for name in KINDS if any(each in name for each in options.faults)]
    if not kinds:
        parser.error(f"no fault has such a name: {', '.join(KINDS)}")
    num_faults = options.num_faults or len(kinds)
    steps = STEPS * (num_faults + 1)
    warm = warm_python()
    try:
        setting = Setting(warm.bin, Path(sys.executable).parent, options.ranks, options.timeout, steps)
        text, problems = report(setting, drawn(num_faults, steps, options.seed, kinds), options.seed)
    finally:
        warm.close()
    print("\n" + text)
    if options.result:
        options.result.write_text(text + "\n")
    if problems:
        sys.exit("not all as it must be")


if __name__ == "__main__":
    main()
