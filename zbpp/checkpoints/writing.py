"""One process's part of a checkpoint: planned by torch.distributed.checkpoint, copied, written, hashed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zbpp.checkpoints.folders import Written, new_digest
from zbpp.runtime.parallel.groups import job_store, unique_name
from zbpp.runtime.parallel.mesh import Place


class Part:
    """The part of a checkpoint that one process writes.

    All processes exchange their `plan`. From all plans `choose` finds which tensors are written here: a
    tensor that several processes have is written by one of them. Then `write`, with `copy` before it if
    training goes on meanwhile.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path, *, is_first: bool) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False)
        self._planner.set_up_planner(dict(tensors), None, is_first)
        self._writer = _Writer(folder)
        self._writer.set_up_storage_writer(is_first)
        self.plan: SavePlan = self._planner.create_local_plan()
        self._items: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._copies: dict[Any, Tensor] | None = None

    def choose(self, plans: Sequence[SavePlan], index: int) -> None:
        """Choose what this process writes. plans: of all processes; index: of this process."""
        # All processes compute this from the same plans, so nothing is sent back.
        chosen, self._metadata = self._planner.create_global_plan(list(plans))
        self._items = self._planner.finish_plan(self._writer.prepare_global_plan(chosen)[index])

    def copy(self, buffers: dict[Any, Tensor]) -> None:
        """Copy the tensors to host memory, so that training may change them. buffers: memory to use again."""
        assert self._items is not None  # `choose` comes first
        self._copies = {}
        devices = set()
        for item in self._items.items:
            tensor = self._resolved(item)
            copy = buffers.get(item.index)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            buffers[item.index] = self._copies[item.index] = copy
            copy.copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def write(self) -> tuple[list[Any], dict[str, Written]]:
        """Write this process's files. Returns DCP's results (the place of each tensor), and the files."""
        assert self._items is not None  # `choose` comes first
        results = self._writer.write_data(self._items, self).value()  # type: ignore[arg-type]  # resolve_data is all that it calls
        return results, dict(self._writer.files)

    def write_metadata(self, results: list[list[Any]]) -> dict[str, Written]:
        """Write `.metadata`, on the first process. results: of all processes."""
        assert self._metadata is not None  # `choose` comes first
        self._writer.files.clear()
        self._writer.finish(self._metadata, results)
        (written,) = self._writer.files.values()
        return {".metadata": written}

    def resolve_data(self, item: WriteItem) -> Tensor:
        """The tensor to write: the copy, if there is one. Called by the writer."""
        return self._resolved(item) if self._copies is None else self._copies[item.index]

    def _resolved(self, item: WriteItem) -> Tensor:
        tensor = self._planner.resolve_data(item)
        assert isinstance(tensor, Tensor)  # all else is in state.json
        return tensor.detach()


class _Writer(FileSystemWriter):
    """DCP's writer of files, which also hashes them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.files: dict[str, Written] = {}
        self.fs = _HashingFiles(self.files)

    def storage_meta(self) -> StorageMeta:
        """No paths: a checkpoint may be moved."""
        return StorageMeta()


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
        self._stream, self.digest, self.size = stream, new_digest(), 0

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


# ----------------------------------------------------------------
# Brings values from all processes of a mesh to the first one, in the background, while training goes on.
#
# The values go through the job's store. A collective call would mix with those of the training step.

_PAUSE = (
    0.02  # s between two polls of the store. A blocking wait would hold up training steps, which use it, too
)
_GRACE = 30.0  # s that a thread goes on waiting for other processes when its own process wants to end


class Exchange:
    """Brings one value of each process to the first one, once. The constructor is collective.

    index: this process's number in `place.gather`; 0 on the first process.
    """

    def __init__(self, place: Place) -> None:
        mine = dist.get_rank() if dist.is_initialized() else 0
        found = place.gather((mine, unique_name()))
        self.index = [rank for rank, _ in found].index(mine)
        self._size = len(found)
        self._store = job_store(f"{found[0][1]}/checkpoint") if self._size > 1 else None

    def post(self, value: Any) -> None:
        """Send this process's value to the first process."""
        if self._store is not None and self.index:
            # torch takes bytes, too, but its annotation says str.
            self._store.set(str(self.index), pickle.dumps(value))  # type: ignore[arg-type]

    def collect(self, own: Any) -> list[Any]:
        """The values of all processes, in the order of `index`; called on the first process. Waits for all.

        Raises RuntimeError if the main thread ends and a value is still missing 30 s later.
        """
        values = [own]
        for index in range(1, self._size):
            assert self._store is not None  # there are other processes
            self._wait(str(index))
            values.append(pickle.loads(self._store.get(str(index))))
            self._store.delete_key(str(index))
        return values

    def _wait(self, key: str) -> None:
        end = None
        while self._store is not None and not self._store.check([key]):
            if end is None and not threading.main_thread().is_alive():
                end = monotonic() + _GRACE
            if end is not None and monotonic() > end:
                raise RuntimeError(f"process {key} has not written its part: is it gone?")
            sleep(_PAUSE)
