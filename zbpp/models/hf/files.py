"""A folder of weights as Hugging Face writes them: one safetensors file, or several with an index.

Names, shapes and dtypes come from the files' headers. Values are read one tensor at a time.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_OLD = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class Entry(NamedTuple):
    """The file of a tensor, its shape and its dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """The safetensors of a folder.

    Raises ValueError for a folder without safetensors, and, when `entries` is first asked for, for a file
    that is missing, truncated or not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"path={folder} is no folder: write one with config.json and safetensors; to get a model of "
                "the Hub, run: hf download NAME --local-dir FOLDER"
            )
        _refuse_other_formats(folder)
        self.folder = folder

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """{name in the files: its entry}, of all files; a single file goes before an index."""
        index = self.folder / INDEX
        if (self.folder / SINGLE).exists():
            return _entries_of(self.folder / SINGLE)
        places = _weight_map(index)
        found: dict[str, Entry] = {}
        for name in sorted(set(places.values())):
            found |= _entries_of(self.folder / name)
        if lost := sorted(places.keys() - found.keys()):
            raise ValueError(f"{index} names {lost[0]} in {places[lost[0]]}, which does not hold it")
        return {name: found[name] for name in places}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor, on the CPU. dtype: of a floating-point tensor; None: as in the file."""
        entry = self.entries[name]
        with _opened(entry.file) as file:
            values: Tensor = file.get_tensor(name)
        return values.to(dtype) if dtype is not None and values.is_floating_point() else values


def _refuse_other_formats(folder: Path) -> None:
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        return
    if (folder / "adapter_model.safetensors").exists():
        raise ValueError(f"path={folder} holds an adapter, not a model: write the folder of its base model")
    old = sorted(each.name for pattern in _OLD for each in folder.glob(pattern))
    if old:
        raise ValueError(
            f"path={folder} holds {old[0]}, which can't be read in parts: convert it once with "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    raise ValueError(
        f"path={folder} has neither {SINGLE} nor {INDEX}: write a folder with weights, or "
        f"config={folder / 'config.json'} instead of path to start from random ones"
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} can't be read ({type(error).__name__}: {error})") from error


def _entries_of(path: Path) -> dict[str, Entry]:
    if not path.exists():
        raise ValueError(f"{path} is missing, which {INDEX} names: complete the download")
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        for name, each in slices.items():
            if each.get_dtype() not in _DTYPES:
                raise ValueError(f"{name} in {path} is {each.get_dtype()}: only plain numbers can be loaded")
        return {
            name: Entry(path, tuple(each.get_shape()), _DTYPES[each.get_dtype()])
            for name, each in slices.items()
        }


def _opened(path: Path) -> Any:
    """The opened file. backend="pread": a mapped file would count as memory of this process."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu", backend="pread")
    except (SafetensorError, OSError) as error:
        size = 0
        with suppress(OSError):
            size = path.stat().st_size
        raise ValueError(
            f"{path} is no whole safetensors file ({error}; {size} bytes): copy or download it again"
        ) from error
