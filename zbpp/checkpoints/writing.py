"""DCP's writer of files, which also hashes them, and at the end makes the checkpoint whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from zbpp.checkpoints import folders
from zbpp.checkpoints.folders import Written


class _Results(NamedTuple):
    """What a process has written: DCP's results (the place of each tensor), and its files."""

    results: list[Any]
    files: dict[str, Written]


class FolderWriter(FileSystemWriter):
    """path: of the finished checkpoint. facts: the text of state.json. keep: as in `save`."""

    def __init__(self, path: Path, facts: str, keep: int | None) -> None:
        super().__init__(folders.unfinished(path), overwrite=False)
        self._final, self._facts, self._keep = path, facts, keep
        self._files: dict[str, Written] = {}
        self.fs = _HashingFiles(self._files)

    def storage_meta(self) -> StorageMeta:
        """No paths: a checkpoint may be moved."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this process's part."""
        results = super().write_data(plan, planner).value()
        done: Future[Any] = Future()
        done.set_result(_Results(results, dict(self._files)))
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write what is left, on the first process, and give the checkpoint its name."""
        files = {name: each for part in results for name, each in part.files.items()}
        super().finish(metadata, [part.results for part in results])
        files[folders.METADATA] = self._files[folders.METADATA + ".tmp"]
        state = folders.unfinished(self._final) / folders.STATE
        files[folders.STATE] = folders.write_file(state, self._facts)
        folders.commit(self._final, files)
        if self._keep is not None:
            folders.keep_newest(self._final.parent, self._keep, self._final)


class _HashingFiles(FileSystem):
    def __init__(self, files: dict[str, Written]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
        self._files[Path(path).name] = Written(hashing.size, hashing.digest.hexdigest())


class _HashingStream:
    """A file that is written from its beginning to its end.

    Each tensor's writer (torch's NoCloseWriter) flushes the file again when that writer is deleted. After an
    error, such as a full disk, the file is closed by then.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.digest, self.size = stream, folders.new_digest(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        written: int = self._stream.write(data)
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        number: int = self._stream.fileno()
        return number

    def close(self) -> None:
        self._stream.close()
