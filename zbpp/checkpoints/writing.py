"""One process's part of a checkpoint: planned by torch.distributed.checkpoint, copied, written, hashed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zbpp.checkpoints.folders import Written, new_digest


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
