"""The folder of a run: one job at a time may use it.

Files of an earlier run are replaced only if the user asked for it, and are never mixed with new ones.

`.lock` exists while a job uses the folder; the lock on it ends with the process, however the process ends.
`job.json` says which job made the run. A job that was started again (torchrun's restart, Slurm's requeue)
finds the files of its own unfinished attempt, and moves them to `attempt-1`, `attempt-2`, ... If two commands
have one job's name, the second one replaces the files of the first one, with overwrite=true.

With resume=auto the same holds for any unfinished run. A run with checkpoints goes on in the same files:
`metrics.jsonl` keeps the lines up to the checkpoint. Later metrics and checkpoints, which the run makes
again, move to `attempt-1`, too.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zbpp.checkpoints.folders import checkpoints_in, step_of
from zbpp.error_text import shown_path
from zbpp.training.folder.folder_lock import FolderLock, this_process
from zbpp.training.folder.run_files import FolderError, named_in_errors, write_whole

OF_A_RUN = (
    "job.json", "config.yaml", "metrics.jsonl", "summary.json", "timeline.png", "trace.json", "bench.json",
    "bench.png", "costs.json", "memory.json", "memory.png", "*.safetensors", "adapter", "wandb",
    "tensorboard", "profile", "samples.jsonl", "attempt-*", "checkpoints", "failure",
)  # fmt: skip


CHECKPOINTS = "checkpoints"
_WANDB = "wandb"
_BY_STEP = ("metrics.jsonl", "samples.jsonl")  # each line has its step
_WEIGHTS = ("stage-*.safetensors", "adapter")  # of the step at which the run was left


class RunFolder:
    """A folder that this process has claimed. Until `begin`, nothing in the folder changes.

    source: a folder of checkpoints to go on from, or one checkpoint; None: the run begins anew. has_ended:
    whether the run in the folder did all of its steps and wrote its summary; False for a job that was started
    again, which may repeat its end.
    """

    def __init__(self, path: Path, lock: FolderLock, *, overwrite: bool, resume: str, job: str) -> None:
        self.path, self._job, self._resume = path, job, resume
        self._lock = lock
        self._written: dict[str, str] = {}
        earlier = _read(path / "job.json")
        self.has_ended = _is_finished(path) and not _is_restart()
        is_unfinished = "job" in earlier and not _is_finished(path)
        is_own = is_unfinished and earlier["job"] == job
        # A user's new command may start another number of processes; a restart should not.
        self._num_processes = earlier.get("num_processes") if is_own and _is_restart() else None
        # Two commands in one Slurm allocation have one job's name: the second one's overwrite=true replaces
        # the first one's files. But a restart keeps the files of its own command.
        is_kept = not overwrite or (is_own and _is_restart())
        self._was_left = is_unfinished and is_kept and (is_own or resume == "auto")
        has_begun = is_own and is_kept and earlier.get("resume") == resume
        self.source = _source(path, resume, is_replaced=not is_kept, has_begun=has_begun)
        self._goes_on = self.source is not None and _is_within(self.source, path / CHECKPOINTS)
        if self._files() and not (overwrite or self._was_left or self._goes_on):
            raise FolderError(
                f"run_dir={shown_path(path)} holds a run already: write another run_dir, or "
                "overwrite=true to replace it"
            )

    def check_number(self, num_processes: int) -> None:
        """Raise FolderError if torchrun or Slurm started this job again with another number of processes."""
        if self._num_processes not in (None, num_processes):
            raise FolderError(
                f"this job began with {self._num_processes} processes and was started again with "
                f"{num_processes}: write parallel.elastic=true to go on with {num_processes} (losses then "
                f"differ in their last digits), or start {self._num_processes} again"
            )

    def begin(self, step: int = 0, num_processes: int | None = None) -> None:
        """Go on after a step of the run in the folder, or make room for a new run.

        The files of this job's earlier attempt are moved aside; those of another run are deleted.
        """
        with named_in_errors(self.path):
            if self._goes_on:
                self._cut_back(step)
            elif self._was_left:
                self._keep_attempt()
            else:
                for path in self._files():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        record = {"job": self._job, "resume": self._resume, "num_processes": num_processes, **this_process()}
        self.write("job.json", json.dumps(record) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file that stays as it is until the run ends. Raises FolderError."""
        write_whole(self.path / name, text)
        self._written[name] = text

    def is_there(self) -> bool:
        """Whether the folder is still the one that was claimed."""
        return self._lock.is_there()

    def make_again(self) -> bool:
        """Claim a deleted folder again; False if only its lock file was deleted. Raises FolderError."""
        with named_in_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.take_again()
        record = self.path / "job.json"
        if record.exists():
            if record.read_text() == self._written.get("job.json"):
                return False
            raise FolderError(
                f"run_dir={shown_path(self.path)} was deleted while the run was training, and holds "
                "another run now: this one ends"
            )
        for name, text in self._written.items():
            write_whole(self.path / name, text)
        return True

    def _cut_back(self, step: int) -> None:
        """Move metrics and checkpoints of later steps to a folder of their own."""
        (self.path / "summary.json").unlink(missing_ok=True)
        checkpoints = self.path / CHECKPOINTS
        for path in checkpoints.glob("*.tmp"):  # of a job that died
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        later = [path for path in checkpoints_in(checkpoints) if (step_of(path) or 0) > step]
        weights = [path for pattern in _WEIGHTS for path in self.path.glob(pattern)]
        parts = {name: _split(self.path / name, step) for name in _BY_STEP}
        if later or any(lost for _, lost in parts.values()):
            attempt = self._next_attempt()
            (attempt / CHECKPOINTS).mkdir()
            for path in later:
                path.rename(attempt / CHECKPOINTS / path.name)
            for name, (kept, lost) in parts.items():
                if kept or lost:
                    (attempt / name).write_text("".join(lost))
            for path in weights:
                path.rename(attempt / path.name)
            print(f"what came after step {step} is kept in {shown_path(attempt)}", flush=True)
        else:  # the checkpoint has them; another number of stages would leave the files of both
            for path in weights:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, (kept, _) in parts.items():
            if (self.path / name).exists():  # rewritten in any case: its last line may be cut off
                draft = self.path / f"{name}.tmp"
                draft.write_text("".join(kept))
                draft.rename(self.path / name)

    def _next_attempt(self) -> Path:
        number = 1
        while (self.path / f"attempt-{number}").exists():
            number += 1
        attempt = self.path / f"attempt-{number}"
        attempt.mkdir()
        return attempt

    def _keep_attempt(self) -> None:
        files = [path for path in self._files() if not path.name.startswith("attempt-")]
        kept = self._next_attempt()
        for path in files:
            path.rename(kept / path.name)
        print(f"the files of an attempt that did not end are kept in {shown_path(kept)}", flush=True)

    def _files(self) -> list[Path]:
        return sorted(path for pattern in OF_A_RUN for path in self.path.glob(pattern))


def _source(path: Path, resume: str, *, is_replaced: bool, has_begun: bool) -> Path | None:
    """A folder of checkpoints to go on from, or one checkpoint; None: there are none.

    has_begun: whether the same command was started before. Then its own checkpoints are newer than `resume`;
    if `resume` is in this folder, only a restart says so. Raises FolderError for a path without checkpoints.
    """
    if resume == "none":
        return None
    checkpoints = path / CHECKPOINTS
    has_own = bool(checkpoints_in(checkpoints)) and not is_replaced
    if resume == "auto":
        return checkpoints if has_own else None
    if has_own and has_begun and (_is_restart() or not _is_within(Path(resume), path)):
        return checkpoints
    given = Path(resume)
    if step_of(given) is None and not checkpoints_in(given):
        given = given / CHECKPOINTS  # a run's folder
    if not given.is_dir() or (step_of(given) is None and not checkpoints_in(given)):
        raise FolderError(
            f"resume={resume} holds no checkpoint: write a run's folder, a folder such as "
            f"{shown_path(path) / CHECKPOINTS / 'step-100'}, auto or none"
        )
    return given.absolute()


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _split(path: Path, step: int) -> tuple[list[str], list[str]]:
    """The lines of a file up to a step, and those after it. A line that was cut off is dropped."""
    kept: list[str] = []
    lost: list[str] = []
    # A character may be cut off, too.
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            number = json.loads(line)["step"]
            (kept if number <= step else lost).append(f"{line}\n")
    return kept, lost


def _is_finished(path: Path) -> bool:
    """Whether the run in a folder has done all of its steps; one that was left has not."""
    return (path / "summary.json").exists() and not _read(path / "summary.json").get("left")


def check_free(path: str | os.PathLike[str], *, overwrite: bool = False, resume: str = "none") -> None:
    """Raise FolderError if `claimed` would, before ranks are started; nothing changes."""
    with claimed(path, overwrite=overwrite, resume=resume):
        pass


@contextmanager
def claimed(
    path: str | os.PathLike[str], *, overwrite: bool = False, resume: str = "none"
) -> Iterator[RunFolder]:
    """The folder of a run, made if need be; inside the with block no other job can claim it.

    Only one rank of a job calls this. resume: auto, to go on with the run that is here if it has checkpoints;
    none; or a path of checkpoints.

    Raises FolderError if another job is using it, or if it holds an earlier run and `overwrite` is False.
    A folder made for a job that never began its run is removed again.
    """
    folder = Path(path).absolute()  # code of the user may call os.chdir
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise FolderError(f"run_dir={path}: {error}; write another run_dir") from error
    try:
        yield RunFolder(folder, lock, overwrite=overwrite, resume=resume, job=_this_job())
    finally:
        lock.release()
        with suppress(OSError):  # at the first folder that is not empty
            for each in made:
                each.rmdir()


def _read(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _this_job() -> str:
    """A name that is the same at all starts of this job, and that no other job has."""
    slurm, torchrun = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID")
    if slurm:
        return f"slurm {slurm}"
    if torchrun and torchrun != "none":  # "none": the job has no name
        return f"torchrun {torchrun}"
    return f"process {os.getppid() if torchrun else os.getpid()} on {socket.gethostname()}"


def _is_restart() -> bool:
    """Whether Slurm or torchrun has started this job again."""
    counts = (os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)
