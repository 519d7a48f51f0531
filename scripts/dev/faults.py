"""Faults in training jobs: a job of real processes in a folder of its own, and how each fault is put in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from zbpp.checkpoints.folders import checkpoints_in

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # for the commands that start without importing torch

from helpers.warm import WarmPython  # noqa: E402

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MISBEHAVE")


def warm_python() -> WarmPython:
    """The commands `zbpp` and `torchrun`, whose processes are forks of one that has imported torch."""
    return WarmPython(Path(sys.executable), str(ROOT))


class Job:
    """A training job. Its output goes to `log`, by which its processes are found, too.

    how: "zbpp", whose ranks are its own, or "torchrun".
    commands: the folder of the two commands.
    """

    def __init__(
        self,
        folder: Path,
        commands: Path,
        num_ranks: int,
        arguments: list[str],
        *,
        how: str = "zbpp",
        environment: Mapping[str, str] | None = None,
        name: str = "first",
    ) -> None:
        self.misbehave = "{}"
        self.folder, self.num_ranks, self.log = folder, num_ranks, folder / f"{name}.log"
        for path in folder.glob("rank-*.pid"):
            path.unlink()
        inherited = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN}
        start = {
            "zbpp": [commands / "zbpp", "train", "-n", num_ranks],
            "torchrun": [
                commands / "torchrun", "--standalone", "--nproc-per-node", num_ranks,
                "--shutdown-timeout", 3, "--monitor-interval", 0.05, "-m", "zbpp.train",
            ],
        }[how]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, start), *arguments],
                cwd=folder,
                env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pid(self, rank: int) -> int:
        """The process of a rank; waits until it has built its model."""
        path, end = self.folder / f"rank-{rank}.pid", time.monotonic() + 120
        while not path.exists() and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.002)
        return int(path.read_text())

    def alive(self) -> set[int]:
        """The processes of this job that have not ended: all whose output or error goes to its log."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                outputs = [os.readlink(folder / "fd" / number) for number in "12"]
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if str(self.log) in outputs and state != "Z":
                    found.add(int(folder.name))
        return found

    def text(self) -> str:
        """What the job has said."""
        return self.log.read_text(errors="replace")

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        """Wait until metrics.jsonl has the line of a step; TimeoutError, also if the job ends before."""
        end = time.monotonic() + timeout
        while self._num_lines() < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"the job did not reach step {step}:\n{self.text()[-3000:]}")
            time.sleep(0.002)

    def _num_lines(self) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def wait(self, timeout: float) -> float | None:
        """Wait until no process of the job is left; returns the time at which this was so, else None."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None and not self.alive():
                return time.time()
            time.sleep(0.02)
        return None

    def kill(self) -> None:
        """End what is left."""
        for _ in range(20):
            left = self.alive()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        self.process.wait()


# ---------------------------------------------------------------- kinds of faults


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
    before the job is started again. leaves: the job must end with status 0, unfinished. hows: see Job.
    needs_sigkill: whether no other signal ends a rank. is_real: the processes of the launcher must be real
    ones, since it matters who is whose child.
    """

    inject: Inject
    words: tuple[str, ...]
    misbehave: dict[str, Any] = field(default_factory=dict)
    leaves: bool = False
    before_next: Callable[[Path, Random], None] = lambda run, rng: None
    hows: tuple[str, ...] = ("zbpp",)
    is_real: bool = False
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


def _truncate_newest(run: Path, rng: Random) -> None:
    """Cut a file with tensors of the newest checkpoint."""
    path = rng.choice(sorted(checkpoints_in(run / "checkpoints")[0].glob("*.distcp")))
    os.truncate(path, rng.randrange(path.stat().st_size))


def _own(do: str, where: str, *words: str, rank: str = "any", **options: Any) -> Kind:
    return Kind(
        inject=_misbehaves, misbehave={"do": do, "where": where, "rank": rank}, words=words, **options
    )


_BOTH: Any = {"hows": ("zbpp", "torchrun")}
# `zbpp train -n` says which signal, torchrun says its number; `zbpp hang` says which rank has no record.
_KILLED = r"rank \d died of SIGKILL|exitcode: -9"
_MISSING = r"rank \d left no record"
_DIED = (_KILLED, _MISSING)
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
        inject=_kill(signal.SIGTERM, "job"), words=("left after step",), leaves=True
    ),
    "SIGSEGV of a rank": _own("segfault", "F", r"died of SIGSEGV|exitcode: -11", _MISSING, **_BOTH),
    "exception in F": _own("raise", "F", _PLANTED, r"\dF\d", **_BOTH),
    "exception in B": _own("raise", "B", _PLANTED, r"\dB\d", **_BOTH),
    "exception in the loss": _own("raise", "loss", _PLANTED, rank="last", **_BOTH),
    "exception in the data": _own("raise", "data", _PLANTED, rank="first", **_BOTH),
    "a rank leaves with 0": _own("leave", "F", _MISSING),
    "endless loop in F": _own("loop", "F", r"rank \d is behind: at \dF\d", needs_sigkill=True),
    "endless loop in B": _own("loop", "B", r"rank \d is behind: at \dB\d", needs_sigkill=True),
    "Python's lock held in F": _own("hold Python's lock", "F", _MISSING, needs_sigkill=True),
    "a message is lost": _own("lose a message", "F", "a message is lost", rank="not last"),
    "out of memory": _own("out of memory", "F", "memory"),
    "truncated checkpoint": Kind(
        inject=_kill_behind_two_saves,
        words=("SIGKILL", "damaged|bytes"),
        before_next=_truncate_newest,
    ),
    "kill in a save": Kind(inject=_kill_in_a_save, words=("SIGKILL",)),
}  # fmt: skip
