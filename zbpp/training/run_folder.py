"""The folder of a run: one job at a time may use it, and a file in it is there whole or not at all.

Files of an earlier run are replaced only if the user asked for it, and are never mixed with new ones.

`.lock` exists while a job uses the folder; the lock on it ends with the process, however the process ends.
`job.json` says which job made the run. A job that was started again (torchrun's restart, Slurm's requeue)
finds its own unfinished run and goes on with it; with resume=auto so does any other job. A run with
checkpoints goes on in the same files: `metrics.jsonl` keeps the lines up to the checkpoint. A run that died
before its first checkpoint begins again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from zbpp.checkpoints.folders import checkpoints_in, step_of
from zbpp.error_text import shown_path

OF_A_RUN = (
    "job.json", "config.yaml", "metrics.jsonl", "summary.json", "timeline.png", "trace.json", "bench.json",
    "bench.png", "costs.json", "*.safetensors", "adapter", "wandb",
    "tensorboard", "profile", "checkpoints", "failure",
)  # fmt: skip
CHECKPOINTS = "checkpoints"


class FolderError(ValueError):
    """A run folder that can't be used."""


class WriteError(RuntimeError):
    """A file of a run that can't be written."""


class RunFolder:
    """A folder that this process has claimed. Until `begin`, nothing in the folder changes.

    source: a folder of checkpoints to go on from, or one checkpoint; None: the run begins anew. has_ended:
    whether the run in the folder did all of its steps and wrote its summary; False for a job that was started
    again, which may repeat its end.
    """

    def __init__(self, path: Path, *, overwrite: bool, resume: str, job: str) -> None:
        self.path, self._job, self._resume = path, job, resume
        earlier, is_finished = _read(path / "job.json"), _is_finished(path)
        self.has_ended = is_finished and not _is_restart()
        is_unfinished = "job" in earlier and not is_finished
        is_own = is_unfinished and earlier["job"] == job
        # Two commands in one Slurm allocation have one job's name: the second one's overwrite=true replaces
        # the first one's files. But a restart keeps the files of its own command.
        is_kept = not overwrite or (is_own and _is_restart())
        was_left = is_unfinished and is_kept and (is_own or resume == "auto")
        has_begun = is_own and is_kept and earlier.get("resume") == resume
        self.source = _source(path, resume, is_replaced=not is_kept, has_begun=has_begun)
        self._goes_on = self.source is not None and _is_within(self.source, path / CHECKPOINTS)
        if self._files() and not (overwrite or was_left or self._goes_on):
            raise FolderError(
                f"run_dir={shown_path(path)} holds a run already: write another run_dir, or "
                "overwrite=true to replace it"
            )
        if self._goes_on and self.source is not None and (step := step_of(self.source)) is not None:
            later = [each.name for each in checkpoints_in(self.source.parent) if (step_of(each) or 0) > step]
            if later:
                raise FolderError(
                    f"run_dir={shown_path(path)} holds later checkpoints than resume={resume}: write another "
                    f"run_dir, or remove {', '.join(later)}"
                )

    def begin(self, step: int = 0) -> None:
        """Go on after a step of the run in the folder, or delete its files to make room for a new run."""
        with named_in_errors(self.path):
            if self._goes_on:
                self._cut_back(step)
            else:
                _remove(self._files())
        self.write("job.json", json.dumps({"job": self._job, "resume": self._resume, **_this_process()}))

    def write(self, name: str, text: str) -> None:
        """Write a file. Raises WriteError."""
        write_whole(self.path / name, text)

    def _cut_back(self, step: int) -> None:
        """Remove what later steps have left: they are made again."""
        _remove(
            [*self.path.glob("stage-*.safetensors"), *self.path.glob("adapter")]
        )  # the checkpoint has them
        _remove([*self.path.glob("summary.json"), *self.path.glob(f"{CHECKPOINTS}/*.tmp")])
        path = self.path / "metrics.jsonl"
        if path.exists():
            write_whole(path, "".join(_lines_until(path, step)))

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


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lines_until(path: Path, step: int) -> list[str]:
    """The lines of a file up to a step. A line that was cut off is dropped."""
    kept = []
    for line in path.read_text(errors="replace").split("\n"):  # a character may be cut off, too
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    return kept


def _is_finished(path: Path) -> bool:
    """Whether the run in a folder has done all of its steps; one that was left has not."""
    return (path / "summary.json").exists() and not _read(path / "summary.json").get("left")


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


# ----------------------------------------------------------------
# The lock on a run's folder.


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
        lock = _locked(folder / ".lock")
    except OSError as error:
        raise FolderError(f"run_dir={path}: {error}; write another run_dir") from error
    try:
        yield RunFolder(folder, overwrite=overwrite, resume=resume, job=_this_job())
    finally:
        with suppress(OSError):
            if _is_at(folder / ".lock", lock):
                (folder / ".lock").unlink()
        lock.close()
        with suppress(OSError):  # at the first folder that is not empty
            for each in made:
                each.rmdir()


def _locked(path: Path) -> IO[str]:
    """The lock file, locked and saying who holds it. Raises FolderError if another job holds it."""
    while True:
        with ExitStack() as unless_kept:
            file = unless_kept.enter_context(path.open("a+"))
            try:
                # A record lock: unlike flock's, it does not pass to forked helpers, which may live longer.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                raise FolderError(_in_use(path.parent, file.read())) from None
            except OSError as error:
                where = shown_path(path.parent)
                print(f"{where} can't be locked ({error}): no other job must use it meanwhile", flush=True)
            if _is_at(path, file):  # else the last holder removed the file after it was opened here
                file.truncate(0)
                file.write(json.dumps(_this_process()))
                file.flush()
                unless_kept.pop_all()
                return file


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether the path still names this open file."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))


def _in_use(folder: Path, text: str) -> str:
    holder = "by another job"
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        here = json.loads(text)
        holder = f"by process {here['process']} on {here['host']} since {here['started']}"
    return f"run_dir={shown_path(folder)} is in use {holder}: write another run_dir"


def _this_process() -> dict[str, object]:
    """Which process this is, for people."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started}


# ----------------------------------------------------------------
# Files in the folder.


@contextmanager
def named_in_errors(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an OSError, or an error of these kinds, into a WriteError that names the file."""
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise WriteError(
            f"{shown_path(path)} could not be written ({why}): free space, then "
            f"{same_command(path if path.is_dir() else path.parent)}"
        ) from error


def same_command(run_dir: Path) -> str:
    """What the command of a run that has failed does when it is started again, as the end of a sentence."""
    saved = checkpoints_in(run_dir / CHECKPOINTS)
    begins = f"goes on from {saved[0].name}" if saved else "begins again, since there is no checkpoint yet"
    return f"start the same command again with run_dir={shown_path(run_dir)}: the run {begins}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all. Raises WriteError."""
    draft = path.with_name(f"{path.name}.tmp")
    with named_in_errors(path):
        try:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
