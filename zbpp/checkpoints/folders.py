"""Checkpoints on disk: a folder per step, which is whole or is not there.

    checkpoints/
        step-200/            __0_0.distcp, __1_0.distcp, ...   tensors, as torch's DCP writes them
                             .metadata                         where each tensor lies in them
                             state.json                        all that is no tensor
                             manifest.json                     the size of each other file
        step-300.tmp/        a checkpoint that is being written, or that a dead job has left

A folder is renamed to its final name when all of its files are on the disk, and never changed after that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FORMAT = 1  # raised by every change that an older zbpp could not read

MANIFEST, METADATA, STATE = "manifest.json", ".metadata", "state.json"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step}"


def unfinished(path: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return path.with_name(f"{path.name}.tmp")


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found[1]) if found else None


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or damaged."""
    found = [(step_of(path), path) for path in folder.glob("step-*")]
    return [path for step, path in sorted(found, key=lambda pair: pair[0] or 0)[::-1] if step is not None]


# ---- Writing


def prepare(path: Path) -> None:
    """Make the folder that a checkpoint is written into, and remove what a dead job has left there.

    Raises CheckpointError if the step has a checkpoint already, OSError if the folder can't be written.
    """
    if path.exists():
        raise CheckpointError(
            f"{path} exists already, and checkpoints are never overwritten: write another folder, or remove "
            "that one"
        )
    with suppress(FileNotFoundError):
        shutil.rmtree(unfinished(path))
    unfinished(path).mkdir(parents=True)


def commit(path: Path, sizes: Mapping[str, int]) -> None:
    """Turn the unfinished checkpoint of `path` into a finished one.

    sizes: the bytes of all its files, which are on the disk already.
    """
    folder = unfinished(path)
    write_file(
        folder / MANIFEST, json.dumps({"format": FORMAT, "files": dict(sorted(sizes.items()))}, indent=1)
    )
    _sync(folder)
    folder.rename(path)
    _sync(path.parent)


def write_file(path: Path, text: str) -> int:
    """Write a text, and wait until it is on the disk; returns its bytes."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data)


def discard(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed to `....tmp` first, so that a checkpoint of which only a part is removed looks unfinished.
    """
    aside = path if path.name.endswith(".tmp") else path.with_name(f"{path.name}.removed.tmp")
    with suppress(FileNotFoundError):
        if aside != path:
            path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def set_aside(path: Path) -> None:
    """Give a damaged checkpoint a name that no checkpoint has."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    with suppress(OSError):  # the folder may be read-only: then nothing is saved there either
        path.rename(aside)


def keep_newest(folder: Path, number: int, written: Path) -> None:
    """Remove all but the `number` newest checkpoints, and what dead jobs have left of removed ones.

    `written` stays in any case, and so do checkpoints of later steps than it.
    """
    others = [path for path in checkpoints_in(folder) if path != written]
    for path in others[number - 1 :]:
        if (step_of(path) or 0) < (step_of(written) or 0):
            discard(path)
    for path in folder.glob("step-*.removed.tmp"):
        discard(path)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    with suppress(OSError):  # some file systems can't sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- Reading


def manifest_of(path: Path) -> dict[str, int]:
    """The size of each file of a checkpoint, by its manifest.

    Raises ValueError, which says why, if the checkpoint is damaged; CheckpointError if a newer zbpp wrote it;
    OSError if the file can't be read, which says nothing about the checkpoint.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version = manifest["format"]
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{MANIFEST} can't be read ({error})") from error
    if type(version) is not int or version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, and this zbpp reads formats up to {FORMAT}: a newer zbpp wrote "
            "it, so update zbpp"
        )
    missing = {METADATA, STATE} - files.keys()
    unlisted = {file.name for file in path.glob("*.distcp")} - files.keys()
    if missing or unlisted:
        raise ValueError(f"{MANIFEST} does not list {', '.join(sorted(missing | unlisted))}")
    if any(name != Path(name).name or name == ".." for name in files):
        raise ValueError(f"{MANIFEST} lists files of another folder")
    return files


def check_sizes(path: Path) -> None:
    """Each file that the manifest lists is there and has its size. Raises as `manifest_of` does."""
    for name, expected in manifest_of(path).items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise ValueError(f"{name} {found}")


# ----------------------------------------------------------------
# What can go wrong with a checkpoint.


class CheckpointError(ValueError):
    """A checkpoint that can't be written or loaded; the message says why, and what to do instead."""
