"""Commands that begin without importing torch: each process of theirs is a fork of one that has done so.

Importing torch and zbpp takes six seconds of a core, in every process of every command that a test starts.
Here a server imports them once (server.py). `python`, `zbpp` and `torchrun` of the folder `bin` hand their
arguments, environment, current folder and open files to the server (client.py), which forks; the fork does
what that Python would have done. A process that the fork starts with multiprocessing or torchrun is a fork
of the server in its turn. What depends on a first import needs a real Python: see tests/test_wheel.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_HERE = Path(__file__).parent


class WarmPython:
    """A server beside this process, and `bin`, the folder of its commands. It ends with this process."""

    def __init__(self, python: Path, pythonpath: str) -> None:
        """python: the interpreter to stand for, with the commands `zbpp` and `torchrun` beside it or not."""
        self._folder = TemporaryDirectory(prefix="warm-")
        address, self.bin = Path(self._folder.name) / "socket", Path(self._folder.name) / "bin"
        self.bin.mkdir()
        for name in ("python", "zbpp", "torchrun"):
            self._write_command(name, [sys.executable, "-IS", _HERE / "client.py", address], python)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(64)
            number = listener.fileno()
            self._server = subprocess.Popen(
                [python, "-P", _HERE / "server.py", str(number), self.bin / "python"],
                stdin=subprocess.PIPE,  # the server ends when this end is closed, or this process
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": pythonpath},
                pass_fds=[number],
            )

    def _write_command(self, name: str, client: list[str | Path], python: Path) -> None:
        script = [] if name == "python" else [python.parent / name]
        words = " ".join(map(str, [*client, *script]))
        (self.bin / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (self.bin / name).chmod(0o755)

    def close(self) -> None:
        """End the server and remove the commands."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._folder.cleanup()
