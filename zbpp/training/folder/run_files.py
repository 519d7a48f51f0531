"""The files in a run's folder, on a disk that may be full and in a folder that may be deleted meanwhile.

A file is written whole or not at all; an error names the file and says what to do. A record, to which a run
adds a line per step, keeps what can't be written and writes it as soon as it can.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zbpp.error_text import shown_path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK = 2**20  # bytes


class FolderError(ValueError):
    """A run folder that can't be used."""


def not_written(path: Path, error: BaseException) -> str:
    """A sentence for a file that could not be written: which one, why, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    is_full = number in _FULL or "No space left" in str(error)
    why = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
    to_do = "free space there" if is_full else "see to the folder, or write another run_dir"
    return f"{shown_path(path)} could not be written ({why}): {to_do}"


@contextmanager
def named_in_errors(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an OSError, or an error of these kinds, into a FolderError that names the file."""
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        again = "then start the same command again: the run goes on from its newest checkpoint"
        raise FolderError(f"{not_written(path, error)}; {again}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all. Raises FolderError."""
    draft = path.with_name(f"{path.name}.tmp")
    with named_in_errors(path):
        try:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def _say(text: str) -> None:
    print(text, flush=True)


class Record:
    """A file to which a run adds lines, each whole.

    Lines that can't be written are kept and tried again with the next line. A file that was deleted is
    written again, with all its lines, as long as this process has it open.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = _say) -> None:
        self.path, self._say = path, say
        self._kept: list[bytes] = []
        self._has_failed = False
        with named_in_errors(path):
            self._file = _opened(path)

    def add(self, line: str) -> None:
        """Add a line, now or later."""
        self._kept.append(line.encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                self._say(f"{not_written(self.path, error)}; until then its lines are kept in memory")
            self._has_failed = True
        else:
            if self._has_failed:
                self._say(f"{shown_path(self.path)} is complete again")
            self._has_failed = False

    @property
    def missing(self) -> list[str]:
        """The lines that the file lacks."""
        return [line.decode().rstrip("\n") for line in self._kept]

    def close(self) -> None:
        """Try once more; print the lines that can't be written. Raises FolderError if there are any."""
        try:
            if self._kept:
                self._write()
        except OSError as error:
            lines = "\n".join(self.missing)
            self._say(
                f"the last {len(self._kept)} lines of {shown_path(self.path)}, which could not be "
                f"written:\n{lines}"
            )
            raise FolderError(f"{not_written(self.path, error)}; its last lines are printed above") from error
        finally:
            self._file.close()

    def _write(self) -> None:
        if not _is_at(self.path, self._file):
            self._make_again()
        while self._kept:
            _append(self._file, self._kept[0])
            del self._kept[0]

    def _make_again(self) -> None:
        """Write a deleted file again. If another file is there (an editor replaces files), continue in it."""
        is_deleted = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = _opened(self.path)
        try:
            if is_deleted:
                offset = 0
                while block := os.pread(self._file.fileno(), _BLOCK, offset):
                    _append(new, block)
                    offset += len(block)
        except OSError:
            self.path.unlink()  # it has only a part of the lines; the deleted file has them all
            new.close()
            raise
        self._file.close()
        self._file = new
        done = "was deleted, and is written again" if is_deleted else "was replaced; lines go to the new file"
        self._say(f"{shown_path(self.path)} {done}")


def _opened(path: Path) -> BinaryIO:
    return path.open("ab+", buffering=0)


def _append(file: BinaryIO, data: bytes) -> None:
    """Append all of this or nothing."""
    size = os.fstat(file.fileno()).st_size
    try:
        done = 0
        while done < len(data):
            done += file.write(data[done:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), size)
        raise


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether the path still names this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a file system that does not answer now
        return True
