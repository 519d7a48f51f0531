"""One fault in one job: put in, noticed, started again, compared with the run that had no fault."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from faults.job import Job, curve_of, lines_of
from faults.kinds import KINDS, Injected, Kind, small_disk
from zbpp.checkpoints.folders import check_contents, check_sizes, checkpoints_in, step_of
from zbpp.commands import hang

STEPS, EVERY = 40, 4  # steps of a run, and between its checkpoints
GRACE = 5.0  # s beside the timeout in which a fault must be noticed
OF_TORCHELASTIC = 30.0  # s more, where a rank ends by SIGKILL only: torchelastic sends SIGTERM before
NUM_MICROBATCHES = 4


@dataclass
class Row:
    """What happened. detected: s; lost: steps that were done again; problems: what must not be."""

    fault: str
    seed: int
    where: str = ""
    detected: float | None = None
    recovered: str = ""
    lost: int | None = None
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """What all cases share. warm, real: the folders of the commands, see `Job`."""

    warm: Path
    real: Path
    num_ranks: int
    timeout: float
    steps: int = STEPS
    seconds: float = 0.002  # of each F

    @property
    def arguments(self) -> list[str]:
        """Of every run, in the folder of its case."""
        return [
            "model._target_=misbehave.Model", "data._target_=misbehave.data", "schedule=zb_h1",
            f"num_microbatches={NUM_MICROBATCHES}", "microbatch_size=2", f"steps={self.steps}",
            "run_dir=run", f"checkpoint.every={EVERY}", "evaluate_every=0",
            "measure_every=0", "save_weights=false",
            "print_every=1000", "parallel.device=cpu", f"parallel.timeout={self.timeout}",
        ]  # fmt: skip

    def job(self, folder: Path, *, is_real: bool = False, nan: int | None = None, **options: Any) -> Job:
        """Start a run. nan: the step whose batch holds a NaN."""
        plan = json.dumps(options.pop("misbehave", {}))
        environment = {
            "MISBEHAVE": plan,
            "MISBEHAVE_NAN": json.dumps([] if nan is None else [nan]),
            "MISBEHAVE_SLEEP": str(self.seconds),
        }
        commands = self.real if is_real else self.warm
        job = Job(folder, commands, self.num_ranks, self.arguments, environment=environment, **options)
        job.misbehave = plan
        return job


def made(folder: Path) -> Path:
    """A folder for a case, with the code that its job imports."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("misbehave.py"), folder)
    return folder


def reference(setting: Setting, folder: Path) -> list[tuple[Any, ...]]:
    """The curve of a run without a fault."""
    job = setting.job(made(folder))
    gone = job.wait(60 + 2 * setting.steps)
    job.kill()
    if gone is None or job.process.returncode:
        raise RuntimeError(f"the run without a fault failed:\n{job.text()[-6000:]}")
    return curve_of(folder / "run")


def run_case(name: str, seed: int, setting: Setting, whole: list[tuple[Any, ...]], folder: Path) -> Row:
    """Put a fault into a job, and see what happens."""
    row, kind = Row(name, seed), KINDS[name]
    has_disk = kind.on_small_disk and _with_disk(made(folder))
    if not kind.on_small_disk:
        made(folder)
    try:
        _run(row, kind, setting, whole, folder)
    except Exception as error:
        row.problems.append(f"{type(error).__name__}: {error}")
    finally:
        if has_disk:
            subprocess.run(["umount", "-l", str(folder / "disk")], check=False)
    return row


def _with_disk(folder: Path) -> bool:
    has_disk = small_disk(folder)
    if has_disk:
        (folder / "run").symlink_to("disk", target_is_directory=True)
    return has_disk


def _run(row: Row, kind: Kind, setting: Setting, whole: list[tuple[Any, ...]], folder: Path) -> None:
    rng = Random(f"{row.fault} {row.seed}")
    step = rng.randrange(2 * EVERY + 1, setting.steps // 2)
    how = kind.hows[row.seed % len(kind.hows)]
    restarts = int(kind.can_restart and how == "torchrun")
    options: Any = {"how": how, "restarts": restarts, "is_real": kind.is_real}
    job = setting.job(
        folder, misbehave=plan_of(kind, step, setting, rng), nan=step if kind.nan_step else None, **options
    )
    try:
        injected = kind.inject(job, step, rng)
        row.where = injected.where
        if restarts or kind.ends == "goes on":
            _goes_on(row, kind, setting, job, injected)
        else:
            _ends(row, kind, setting, job, injected)
    finally:
        job.kill()
    row.lost = 0 if kind.ends == "goes on" else _lost(row, folder / "run")
    text = job.text() + said_by_hang(folder / "run")
    if not restarts and kind.ends != "goes on":
        text += _start_again(row, kind, setting, folder, rng)
    words = [word.replace("{last}", str(setting.num_ranks - 1)) for word in kind.words]
    row.problems += [f"it does not say {word!r}" for word in words if not re.search(word, text)]
    _compare(row, kind, whole, folder / "run", step)


def said_by_hang(run: Path) -> str:
    """What `zbpp hang` prints of the records that the ranks left; nothing without records."""
    if not (run / "failure").is_dir():
        return ""
    with redirect_stdout(io.StringIO()) as said:
        hang.main([str(run)])
    return said.getvalue()


def plan_of(kind: Kind, step: int, setting: Setting, rng: Random) -> dict[str, Any]:
    """How the job's own code misbehaves, so many steps after its start; {} if it does not."""
    if not kind.misbehave:
        return {}
    last = setting.num_ranks - 1
    place = kind.misbehave["rank"]
    rank = {"any": rng.randrange(last + 1), "first": 0, "last": last, "not last": rng.randrange(last)}[place]
    per_step = 1 if kind.misbehave["where"] == "data" else NUM_MICROBATCHES
    return {**kind.misbehave, "rank": rank, "call": step * per_step + rng.randrange(per_step)}


def _ends(row: Row, kind: Kind, setting: Setting, job: Job, injected: Injected) -> None:
    """The job must end, whole, in time."""
    limit = setting.timeout + GRACE + OF_TORCHELASTIC * kind.needs_sigkill
    gone = job.wait(limit + 40)
    if gone is None:
        row.problems.append(f"processes left after {limit + 40:.0f} s: {len(job.alive())}")
        return
    row.detected = gone - injected.time
    if row.detected > limit:
        row.problems.append(f"detected after {row.detected:.1f} s, later than {limit:.0f} s")
    status = job.process.returncode
    if (status == 0) != (kind.ends == "leaves"):
        row.problems.append(f"exit status {status}:\n{job.text()[-2000:]}")


def _goes_on(row: Row, kind: Kind, setting: Setting, job: Job, injected: Injected) -> None:
    """The job must do its last step; where torchrun starts the ranks again, in time."""
    limit, before = setting.timeout + GRACE, {}
    if kind.can_restart:
        end = time.monotonic() + limit + 40
        before = {rank: job.pid(rank) for rank in range(job.num_ranks)}
        while job.alive() & set(before.values()) and time.monotonic() < end:
            time.sleep(0.02)
        row.detected = time.time() - injected.time
        row.recovered = "torchrun starts the ranks again"
    elif kind.nan_step:
        row.detected, row.recovered = 0.0, "the step is skipped"
    else:
        row.detected, row.recovered = job.noticed - injected.time, "trains on, writes later"
    if row.detected > limit:
        row.problems.append(f"detected after {row.detected:.1f} s, later than {limit:.0f} s")
    gone = job.wait(60 + setting.steps)
    if gone is None or job.process.returncode:
        row.problems.append(f"exit status {job.process.returncode}:\n{job.text()[-2000:]}")


def _start_again(row: Row, kind: Kind, setting: Setting, folder: Path, rng: Random) -> str:
    """Start the same command again without the fault; returns what it says."""
    newest = newest_in(folder / "run")
    kind.before_next(folder / "run", rng)
    expected = newest_in(folder / "run")
    job = setting.job(folder, name="again")
    gone = job.wait(60 + setting.steps)
    job.kill()
    if gone is None or job.process.returncode:
        row.problems.append(f"started again, exit status {job.process.returncode}:\n{job.text()[-2000:]}")
    row.recovered = f"started again: from step {expected}"
    if expected != newest:
        row.recovered += f" (step {newest} is damaged)"
        row.lost = (row.lost or 0) + newest - expected
    return job.text()


def newest_in(run: Path) -> int:
    """The step of the newest whole checkpoint; 0 without one."""
    for path in checkpoints_in(run / "checkpoints"):
        try:
            files = check_sizes(path)
            check_contents(path, files, files)
        except (ValueError, OSError):
            continue
        return step_of(path) or 0
    return 0


def _lost(row: Row, run: Path) -> int:
    """The steps behind the newest checkpoint that have to be done again, or were."""
    steps = [line["step"] for line in lines_of(run)]
    return max(0, (steps[-1] if steps else 0) - newest_in(run))


def _compare(row: Row, kind: Kind, whole: list[tuple[Any, ...]], run: Path, step: int) -> None:
    """The curve is that of the run without a fault, to the last bit; each step once."""
    found = curve_of(run)
    if kind.nan_step:  # the run with the NaN is another run from there on
        found, whole = found[:step], whole[:step]
        # JSON has no NaN: such a loss is no number there.
        number = sum(not isinstance(loss, float) for _, loss, _ in curve_of(run))
        if number != 1:
            row.problems.append(f"not one step, but {number} without a finite loss")
    if found != whole:
        same = sum(a == b for a, b in zip(found, whole, strict=False))
        row.problems.append(f"another curve: {len(found)} lines, {same} of {len(whole)} equal")
    if row.lost is not None and row.lost > 3 * EVERY:
        row.problems.append(f"{row.lost} steps lost: more than between checkpoints")
