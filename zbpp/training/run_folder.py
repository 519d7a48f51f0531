"""The folder of a run: one job at a time may use it.

Files of an earlier run are replaced only if the user asked for it, and are never mixed with new ones.

`.lock` exists while a job uses the folder; the lock on it ends with the process, however the process ends.
`job.json` says which job made the run. A job that was started again (torchrun's restart, Slurm's requeue)
finds the files of its own unfinished attempt, and keeps them in `attempt-1`, `attempt-2`, ...
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

OF_A_RUN = (
    "job.json", "config.yaml", "metrics.jsonl", "summary.json", "timeline.png", "trace.json", "bench.json",
    "bench.png", "costs.json", "memory.json", "memory.png", "*.safetensors", "wandb", "tensorboard",
    "profile", "samples.jsonl", "attempt-*",
)  # fmt: skip


class FolderError(ValueError):
    """A run folder that can't be used."""


class RunFolder:
    """A folder that this process has claimed. Until `begin`, nothing in the folder changes."""

    def __init__(self, path: Path, *, overwrite: bool, job: str) -> None:
        self.path, self._job = path, job
        self._continued = not (path / "summary.json").exists() and _read(path / "job.json").get("job") == job
        if self._files() and not overwrite and not self._continued:
            raise FolderError(
                f"run_dir={path} holds a run already: write another run_dir, or overwrite=true to replace it"
            )

    def begin(self) -> None:
        """Move the files of this job's earlier attempt aside; delete those of another run."""
        if self._continued:
            self._keep_attempt()
        else:
            for path in self._files():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.path / "job.json").write_text(json.dumps({"job": self._job, **_here()}) + "\n")

    def _keep_attempt(self) -> None:
        files = [path for path in self._files() if not path.name.startswith("attempt-")]
        number = 1
        while (self.path / f"attempt-{number}").exists():
            number += 1
        kept = self.path / f"attempt-{number}"
        kept.mkdir()
        for path in files:
            path.rename(kept / path.name)
        print(f"this job was started again: the files of its last attempt are kept in {kept}", flush=True)

    def _files(self) -> list[Path]:
        return sorted(path for pattern in OF_A_RUN for path in self.path.glob(pattern))


def check_free(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise FolderError if `claimed` would, before ranks are started; nothing changes."""
    with claimed(path, overwrite=overwrite):
        pass


@contextmanager
def claimed(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[RunFolder]:
    """The folder of a run, made if need be; inside the with block no other job can claim it.

    Only one rank of a job calls this.

    Raises FolderError if another job is using it, or if it holds an earlier run and `overwrite` is False.
    A folder made for a job that never began its run is removed again.
    """
    folder = Path(path)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        raise FolderError(f"run_dir={folder}: {error}; write another run_dir") from error
    try:
        yield RunFolder(folder, overwrite=overwrite, job=_this_job())
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        lock.close()
        with suppress(OSError):  # at the first folder that is not empty
            for each in made:
                each.rmdir()


def _lock(folder: Path) -> IO[str]:
    """The lock file, locked and saying who holds it."""
    path = folder / ".lock"
    while True:
        with ExitStack() as unless_kept:
            file = unless_kept.enter_context(path.open("a+"))
            _hold(file, folder)
            with suppress(FileNotFoundError):  # the last holder removed the file after it was opened here
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    file.truncate(0)
                    file.write(json.dumps(_here()))
                    file.flush()
                    unless_kept.pop_all()
                    return file


def _hold(file: IO[str], folder: Path) -> None:
    """Lock the file or raise FolderError."""
    try:
        # A record lock: unlike flock's, it does not pass to forked helpers, which may outlive this process.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise FolderError(_in_use(folder, file.read())) from None
    except OSError as error:  # a file system without locks
        print(f"{folder} can't be locked ({error}): no other job must use it meanwhile", flush=True)


def _in_use(folder: Path, text: str) -> str:
    with suppress(ValueError):
        here = json.loads(text)
        holder = f" by process {here['process']} on {here['host']} since {here['started']}"
        return f"run_dir={folder} is in use{holder}: write another run_dir"
    return f"run_dir={folder} is in use by another job: write another run_dir"


def _here() -> dict[str, object]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started}


def _read(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
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
