"""Builds the library in csrc/ once for each Python, torch and state of the source.

It is kept in the folder in which torch keeps extensions: $TORCH_EXTENSIONS_DIR, or else in ~/.cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

from helpers.compiler import missing

NAME = "zbpp_accelerator"
ACCELERATOR = "the emulated accelerator"
_SOURCES = Path(__file__).parent / "csrc"
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


@cache
def library() -> Path:
    """The path of the library, which is built if it isn't there. Several processes may ask at once."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    folder /= f"{NAME}-{_key()}"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{NAME}.so"
    with _locked(folder / "lock"):
        if not built.exists():
            _compile(folder / "unfinished.so")
            os.replace(folder / "unfinished.so", built)
    return built


def _key() -> str:
    source = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        source.update(path.read_bytes())
    return f"{sys.implementation.cache_tag}-torch{torch.__version__}-{source.hexdigest()[:12]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock ends with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> None:
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    (libraries,) = cpp_extension.library_paths()
    command = [
        *(cpp_extension.get_cxx_compiler(), "-std=c++20", "-O1", "-w", "-fPIC", "-shared"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        *(f"-isystem{each}" for each in includes),
        *(str(_SOURCES / "accelerator.cpp"), "-o", str(target)),
        *(f"-L{libraries}", *(f"-l{each}" for each in _LIBRARIES)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated accelerator does not compile:\n{done.stderr[:10_000]}")


if __name__ == "__main__":
    print(missing(ACCELERATOR) or library())
