"""A checkpoint on disk: verified, then read tensor by tensor through torch.distributed.checkpoint.

Nothing that is read can run code. torch.distributed.checkpoint would unpickle `.metadata`, which can run
code: `read_metadata` unpickles nothing but the classes that the file consists of. Tensors are read with
weights_only=True. Everything else is JSON, where torch.distributed.checkpoint would use pickle.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorStorageMetadata,
)

from zbpp.checkpoints.folders import (
    MANIFEST,
    METADATA,
    STATE,
    CheckpointError,
    check_sizes,
    checkpoints_in,
    manifest_of,
    step_of,
)
from zbpp.runtime.processes.mesh import MeshPosition

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip
_KEYS = {"step", "timetable", "model", "optimizer", "states", "info"}


class Checkpoint:
    """A checkpoint of one step. facts: all that is no tensor.

    Raises CheckpointError for contents that zbpp does not write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.facts: dict[str, Any] = json.loads((path / STATE).read_text())
            self._reader = _Reader(path)
            self._metadata = self._reader.read_metadata()
            self._check()
        except CheckpointError:
            raise
        except Exception as error:  # whatever bytes make the parsers do
            raise CheckpointError(f"{path} can't be read ({type(error).__name__}: {error})") from error

    def _check(self) -> None:
        if not isinstance(self.facts, dict) or not self.facts.keys() >= _KEYS:
            raise CheckpointError(f"{self.path}: {STATE} is not what zbpp writes")
        if type(self.facts["step"]) is not int or not 0 <= self.facts["step"] < 2**53:
            raise CheckpointError(f"{self.path}: {STATE} has step={self.facts['step']!r}, which is no step")
        files = manifest_of(self.path)
        for each in (self._metadata.storage_data or {}).values():
            if each.relative_path not in files:
                raise CheckpointError(f"{self.path}: {MANIFEST} does not list {each.relative_path}")

    @property
    def step(self) -> int:
        """How many steps were done."""
        step: int = self.facts["step"]
        return step

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name in the whole model: shape} of the model's tensors."""
        rows = self._metadata.state_dict_metadata
        names = [key.removeprefix("model.") for key in rows if key.startswith("model.")]
        return {name: tuple(self.size_of(f"model.{name}")) for name in names}

    def size_of(self, key: str) -> torch.Size:
        """The shape of a tensor, as a whole."""
        return self._row(key).size

    def dtype_of(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._row(key).properties.dtype

    def _row(self, key: str) -> TensorStorageMetadata:
        row = self._metadata.state_dict_metadata[key]
        if not isinstance(row, TensorStorageMetadata):
            raise CheckpointError(f"{self.path}: {key} is no tensor; zbpp does not write such a checkpoint")
        return row

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the tensors; of a DTensor, the part on this process. Reads no more than is filled."""
        planner = _Planner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self._metadata, False)
        self._reader.set_up_storage_reader(self._metadata, False)
        plan = planner.create_local_plan()
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


def newest_whole(folder: Path, place: MeshPosition) -> tuple[Path, dict[Path, str]]:
    """(the newest whole checkpoint in `folder`, or `folder` itself if it is one; {newer one: its damage}).

    The first process looks. Raises CheckpointError, on every process, if no checkpoint is whole, if one can't
    be read, or if a newer zbpp wrote it: such a checkpoint may be whole, so an older one must not take its
    place. Collective.
    """
    damaged: dict[Path, str] = {}
    found, refusal = None, ""
    if place.is_first and place.rank == 0:
        try:
            found = _newest_whole(folder, damaged)
        except CheckpointError as error:
            refusal = str(error)
        except OSError as error:
            refusal = f"{folder} can't be read ({error}): make it readable, or write another checkpoint"
    found, refusal, damaged = place.broadcast((found, refusal, damaged))
    if found is None:
        raise CheckpointError(refusal)
    return found, damaged


def _newest_whole(folder: Path, damaged: dict[Path, str]) -> Path:
    """The newest whole checkpoint; why newer ones are damaged goes into `damaged`."""
    for path in [folder] if step_of(folder) is not None else checkpoints_in(folder):
        try:
            check_sizes(path)
            return path
        except CheckpointError:
            raise
        except ValueError as error:
            damaged[path] = str(error)
    complaints = "; ".join(f"{path} is damaged: {why}" for path, why in damaged.items())
    raise CheckpointError(complaints or f"{folder} holds no checkpoint: write another folder")


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Refuse pickled objects."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is a pickled object, which zbpp does not load")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, unpickled without a way to run code."""
        return read_metadata(Path(self.path) / METADATA)


def read_metadata(path: Path) -> Metadata:
    """Return what torch.distributed.checkpoint wrote into its file `.metadata`.

    Raises CheckpointError for a class or function that such a file has no use for; other errors for damage.
    """
    # From memory: a damaged length of a text then asks for no more than the file has.
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except MemoryError as error:
        raise CheckpointError(f"{path} is damaged: it asks for more memory than there is") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}: it was not loaded")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class or function of this name, if `.metadata` consists of such; else CheckpointError."""
        # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(enum, name), others by its value.
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in _CLASSES or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata holds {module}.{name}, which it has no use for: it was not loaded")


def _memory_format(enum: object, name: str) -> _MEM_FORMAT_ENCODING:
    if enum is not _MEM_FORMAT_ENCODING:
        raise CheckpointError(f".metadata asks for {name} of {enum!r}: it was not loaded")
    return _MEM_FORMAT_ENCODING[name]


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
