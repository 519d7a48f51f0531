"""The kinds of faults: how each is put into a job, and the words that the job must say."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from faults.job import Job
from zbpp.checkpoints.folders import checkpoints_in


@dataclass(frozen=True)
class Injected:
    """When a fault was put in (s since 1970), and where."""

    time: float
    where: str


Inject = Callable[[Job, int, Random], Injected]  # the int: a step; the fault comes behind it


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault.

    inject: puts it into a running job. misbehave: what the job's own code does instead, see misbehave.py.
    words: regular expressions that the job's output must match. before_next: what is done to the files
    before the job is started again. ends: how the job must end: "fails", "leaves" (status 0, unfinished) or
    "goes on" (to its end). hows: see Job; can_restart: whether torchrun may start the ranks again.
    needs_sigkill: whether no other signal ends a rank. is_real: the processes of the launcher must be real
    ones, since it matters who is whose child.
    """

    inject: Inject
    words: tuple[str, ...]
    misbehave: dict[str, Any] = field(default_factory=dict)
    ends: str = "fails"
    before_next: Callable[[Path, Random], None] = lambda run, rng: None
    hows: tuple[str, ...] = ("zbpp",)
    can_restart: bool = False
    is_real: bool = False
    on_small_disk: bool = False
    nan_step: bool = False
    needs_sigkill: bool = False


def _kill(number: int, place: str) -> Inject:
    """Send a signal to the first, a middle or the last rank, to all, to any, or to the launcher."""

    def inject(job: Job, step: int, rng: Random) -> Injected:
        last = job.num_ranks - 1
        middle, any_rank = rng.randrange(1, max(2, last)), rng.randrange(last + 1)
        some = {"first": [0], "middle": [middle], "last": [last], "any": [any_rank], "job": []}
        ranks = some.get(place, range(last + 1))
        job.wait_for_step(step)
        time.sleep(rng.uniform(0, 0.05))
        pids = [job.pid(rank) for rank in ranks] or [job.process.pid]
        now = time.time()
        for pid in pids:
            os.kill(pid, number)
        who = f"rank {ranks[0]}" if len(pids) == 1 and ranks else place
        return Injected(now, f"{who}, behind step {step}")

    return inject


def _misbehaves(job: Job, step: int, rng: Random) -> Injected:
    """Wait until the job's own code has misbehaved."""
    fired = job.folder / "fired"
    end = time.monotonic() + 120
    while not fired.exists():
        has_ended = job.process.poll() is not None  # before the next look at the file
        if not fired.exists() and (has_ended or time.monotonic() > end):
            raise TimeoutError(f"nothing misbehaved:\n{job.text()[-3000:]}")
        time.sleep(0.002)
    plan = json.loads(job.misbehave)
    where = f"rank {plan['rank']}, {plan['where']} number {plan['call']}"
    return Injected(json.loads(fired.read_text())["time"], where)


def _at_start(job: Job, step: int, rng: Random) -> Injected:
    """The job's start is the fault."""
    return Injected(job.begin, "start")


def _nan(job: Job, step: int, rng: Random) -> Injected:
    job.wait_for_step(step)
    return Injected(time.time(), f"batch of step {step + 1}")


def _fill_disk(job: Job, step: int, rng: Random) -> Injected:
    """Fill the disk, or let files grow no more; free it again a while later."""
    job.wait_for_step(step)
    run, pid, now = job.folder / "run", job.pid(0), time.time()
    if os.path.ismount(job.folder / "disk"):
        with suppress(OSError), (job.folder / "disk" / "filler").open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        free: Callable[[], Any] = (job.folder / "disk" / "filler").unlink
    else:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, ((run / "metrics.jsonl").stat().st_size, hard))
        free = lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))  # noqa: E731
    end = time.monotonic() + 20
    while "metrics.jsonl could not be written" not in job.text() and time.monotonic() < end:
        time.sleep(0.005)
    job.noticed = time.time()
    time.sleep(0.1)
    with suppress(ProcessLookupError):
        free()
    return Injected(now, f"behind step {step}, for {time.time() - now:.1f} s")


def _kill_in_a_save(job: Job, step: int, rng: Random) -> Injected:
    """Kill all ranks at a random moment of the first save behind a step."""
    job.wait_for_step(step)
    checkpoints = job.folder / "run" / "checkpoints"
    while not any(name.endswith(".tmp") for name in os.listdir(checkpoints)):
        if job.process.poll() is not None:
            raise TimeoutError(f"no save:\n{job.text()[-3000:]}")
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.01))
    now = time.time()
    for rank in range(job.num_ranks):
        with suppress(ProcessLookupError):
            os.kill(job.pid(rank), signal.SIGKILL)
    return Injected(now, f"all, in a save behind step {step}")


def _kill_behind_two_saves(job: Job, step: int, rng: Random) -> Injected:
    """Kill all ranks when there are two checkpoints: one of them is to be damaged."""
    job.wait_for_step(step)
    while len(checkpoints_in(job.folder / "run" / "checkpoints")) < 2:
        if job.process.poll() is not None:
            raise TimeoutError(f"no two checkpoints:\n{job.text()[-3000:]}")
        time.sleep(0.002)
    return _kill(signal.SIGKILL, "all")(job, step, rng)


def _damage(change: Callable[[Path, Random], None]) -> Callable[[Path, Random], None]:
    """Change a file with tensors of the newest checkpoint."""

    def before_next(run: Path, rng: Random) -> None:
        newest = checkpoints_in(run / "checkpoints")[0]
        change(rng.choice(sorted(newest.glob("*.distcp"))), rng)

    return before_next


def _flip(path: Path, rng: Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, rng: Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def small_disk(folder: Path) -> bool:
    """Mount 4 MiB as folder/disk; False where that is not allowed."""
    (folder / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder / "disk")]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


def _own(do: str, where: str, *words: str, rank: str = "any", **options: Any) -> Kind:
    return Kind(
        inject=_misbehaves, misbehave={"do": do, "where": where, "rank": rank}, words=words, **options
    )


_BOTH: Any = {"hows": ("zbpp", "torchrun"), "can_restart": True}
# `zbpp train -n` says which signal, torchrun says its number; `zbpp hang` says which rank has no record.
_KILLED = r"rank \d died of SIGKILL|exitcode: -9"
_MISSING = r"rank \d left no record"
_DIED = (_KILLED, _MISSING)
_LOOPS = r"rank \d .*its own code: it is at \d{}\d"
_PLANTED = "planted in user code"

KINDS: dict[str, Kind] = {
    "SIGKILL of the first rank": Kind(inject=_kill(signal.SIGKILL, "first"), words=_DIED, **_BOTH),
    "SIGKILL of a middle rank": Kind(inject=_kill(signal.SIGKILL, "middle"), words=_DIED, **_BOTH),
    "SIGKILL of the last rank": Kind(inject=_kill(signal.SIGKILL, "last"), words=_DIED, **_BOTH),
    "SIGKILL of all ranks": Kind(
        inject=_kill(signal.SIGKILL, "all"), words=("SIGKILL|exitcode: -9",), **_BOTH
    ),
    "SIGKILL of zbpp train": Kind(inject=_kill(signal.SIGKILL, "job"), words=(), is_real=True),
    "SIGKILL of torchrun": Kind(
        inject=_kill(signal.SIGKILL, "job"), words=(), hows=("torchrun",), is_real=True
    ),
    "SIGSTOP of a rank": Kind(inject=_kill(signal.SIGSTOP, "any"), words=(_MISSING,), needs_sigkill=True),
    "SIGTERM of the job": Kind(
        inject=_kill(signal.SIGTERM, "job"), words=("left after step",), ends="leaves"
    ),
    "SIGSEGV of a rank": _own("segfault", "F", r"died of SIGSEGV|exitcode: -11", _MISSING, **_BOTH),
    "exception in F": _own("raise", "F", _PLANTED, r"\dF\d", **_BOTH),
    "exception in B": _own("raise", "B", _PLANTED, r"\dB\d", **_BOTH),
    "exception in the loss": _own("raise", "loss", _PLANTED, rank="last", **_BOTH),
    "exception in the data": _own("raise", "data", _PLANTED, rank="first", **_BOTH),
    "a port in use at the start": Kind(
        inject=_at_start, words=("in use|EADDRINUSE",), hows=("torchrun, port in use",)
    ),
    "a rank never comes": Kind(inject=_at_start, words=("rank {last} ",), hows=("without the last rank",)),
    "a rank leaves with 0": _own("leave", "F", _MISSING),
    "endless loop in F": _own("loop", "F", _LOOPS.format("F"), r"rank \d is behind: at \dF\d"),
    "endless loop in B": _own("loop", "B", _LOOPS.format("B"), r"rank \d is behind: at \dB\d"),
    "a message is lost": _own("lose a message", "F", "a message is lost", rank="not last"),
    "out of memory": _own("out of memory", "F", "memory"),
    "NaN in the data": Kind(inject=_nan, words=(), ends="goes on", nan_step=True),
    "flipped bit in the newest checkpoint": Kind(
        inject=_kill_behind_two_saves, words=("SIGKILL", "damaged|checksum"), before_next=_damage(_flip)
    ),
    "truncated checkpoint": Kind(
        inject=_kill_behind_two_saves,
        words=("SIGKILL", "damaged|bytes"),
        before_next=_damage(_truncate),
    ),
    "kill in a save": Kind(inject=_kill_in_a_save, words=("SIGKILL",)),
    "disk full": Kind(
        inject=_fill_disk,
        words=(r"could not be written \((No space|File too large)", "free space"),
        ends="goes on",
        on_small_disk=True,
    ),
}  # fmt: skip
