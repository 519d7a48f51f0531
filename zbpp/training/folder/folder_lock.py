"""The lock on a run's folder: one job at a time; it ends with the process, however the process ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from zbpp.error_text import shown_path
from zbpp.training.folder.run_files import FolderError


class FolderLock:
    """The lock on a folder, held until `release`. Raises FolderError if another job holds it, and OSError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._file = _lock(folder)

    def is_there(self) -> bool:
        """Whether the folder still has this lock: it may have been deleted, and made again by another job."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that does not answer now
            return True

    def take_again(self) -> None:
        """Lock the folder that is at this path now. Raises as the constructor does."""
        new = _lock(self._path.parent)
        self._file.close()
        self._file = new

    def release(self) -> None:
        """Let other jobs have the folder."""
        if self.is_there():
            with suppress(OSError):
                self._path.unlink()
        self._file.close()


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
                    file.write(json.dumps(this_process()))
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
        print(
            f"{shown_path(folder)} can't be locked ({error}): no other job must use it meanwhile", flush=True
        )


def _in_use(folder: Path, text: str) -> str:
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        here = json.loads(text)
        holder = f" by process {here['process']} on {here['host']} since {here['started']}"
        return f"run_dir={shown_path(folder)} is in use{holder}: write another run_dir"
    return f"run_dir={shown_path(folder)} is in use by another job: write another run_dir"


def this_process() -> dict[str, object]:
    """Which process this is, for people."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started}
