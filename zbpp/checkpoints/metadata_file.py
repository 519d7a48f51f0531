"""`.metadata` of torch.distributed.checkpoint, unpickled without a way to run code or to take endless time.

Only the classes that such a file consists of are let through, and only the opcodes that it is written with.
A key of a dict is hashed at once, and hashing a tuple of tuples of tuples may never end: keys are texts, or a
MetadataIndex of plain values.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zbpp.checkpoints.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip


_BUILT = (
    BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
    TensorStorageMetadata, _StorageInfo,
)  # fmt: skip
# Old ways to make objects, references to objects outside the file, sets (whose members are hashed).
_NEVER = (
    pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID,
    pickle.BINPERSID, pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER, pickle.BYTEARRAY8,
)  # fmt: skip


def read_metadata(path: Path) -> Metadata:
    """What the file holds. Raises CheckpointError for what torch does not write; other errors for damage."""
    # From memory: a text of 2**60 characters is then not allocated before it is found to be missing.
    found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path.parent}: {path.name} holds a {type(found).__name__}")
    return found


class _Unpickler(pickle._Unpickler):  # the one in C has no load_build
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def load_build(self) -> None:
        """Set the attributes of an object of _BUILT; a class or function is refused: all code shares it."""
        if type(self.stack[-2]) not in _BUILT:
            raise CheckpointError(f".metadata changes a {type(self.stack[-2]).__name__}: it was not loaded")
        super().load_build()  # type: ignore[misc]  # typeshed does not know it

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()  # type: ignore[misc]

    def load_reduce(self) -> None:
        _check_call(*self.stack[-2:])
        super().load_reduce()  # type: ignore[misc]

    def load_newobj(self) -> None:
        _check_call(*self.stack[-2:])
        super().load_newobj()  # type: ignore[misc]

    def never(self) -> None:
        raise CheckpointError(".metadata holds what torch does not write into it: it was not loaded")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch.update(dict.fromkeys((code[0] for code in _NEVER), never))

    def find_class(self, module: str, name: str) -> Any:
        """The class or function, if `_ALLOWED` has it. Raises CheckpointError for any other."""
        if (module, name) in _ALLOWED or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata holds {module}.{name}, which it has no use for: it was not loaded")


def _check_key(key: object) -> None:
    is_plain = type(key) is str
    if type(key) is MetadataIndex:
        offset = key.offset
        is_plain = (
            type(key.fqn) is str
            and (offset is None or type(offset) is torch.Size)
            and type(key.index) in (int, type(None))
        )
    if not is_plain:
        raise CheckpointError(".metadata has a key that torch does not write: it was not loaded")


def _check_call(called: object, arguments: object) -> None:
    """Refuse a call that torch does not make. Looking up an enum hashes its argument: plain values only."""
    plain = (str, int, float, bool, type(None))
    is_built = isinstance(called, type) and (called in _BUILT or called is torch.Size)
    if not is_built and not (isinstance(arguments, tuple) and all(type(each) in plain for each in arguments)):
        raise CheckpointError(".metadata calls what torch does not call: it was not loaded")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
