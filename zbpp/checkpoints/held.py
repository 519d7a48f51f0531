"""Holds a checkpoint of a run that still trains: the run may remove it while somebody reads it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from weakref import finalize

_PREFIX = ".read-"  # the folder's name; a run looks only for step-... in its checkpoints


class HeldCheckpoint:
    """The files of a checkpoint under second names (hard links), which stay if the run removes the first.

    path: where to read. It is the checkpoint itself where no links can be made (in a read-only folder, on a
    file system without links): a run may then remove it. The links go with this object. Raises
    FileNotFoundError if the checkpoint is gone already.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint
        try:
            folder = mkdtemp(prefix=_PREFIX, dir=checkpoint.parent)
        except FileNotFoundError:
            raise
        except OSError:
            return
        remove = finalize(self, shutil.rmtree, folder, ignore_errors=True)
        held = Path(folder) / checkpoint.name
        try:
            held.mkdir()
            for file in _files(checkpoint):
                copy = held / file.relative_to(checkpoint)
                copy.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, copy)
        except FileNotFoundError:
            remove()
            raise
        except OSError:
            remove()
        else:
            self.path = held


def _files(folder: Path) -> list[Path]:
    """All files in a folder. Raises FileNotFoundError where it is gone, which a glob would take for empty."""
    found = []
    for entry in os.scandir(folder):
        found += _files(Path(entry.path)) if entry.is_dir() else [Path(entry.path)]
    return found
