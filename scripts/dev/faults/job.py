"""A job of real processes in a folder of its own, started as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))  # for the commands that start without importing torch

from helpers.warm import WarmPython  # noqa: E402

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MISBEHAVE")

_BY_HAND = """
for rank in $(seq 0 $NUM); do RANK=$rank LOCAL_RANK=$rank "$0" -m zbpp.train "$@" & all="$all $!"; done
for each in $all; do wait $each || status=1; done
exit $status
"""


def warm_python() -> WarmPython:
    """The commands `zbpp` and `torchrun`, whose processes are forks of one that has imported torch."""
    return WarmPython(Path(sys.executable), str(ROOT))


class Job:
    """A training job. Its output goes to `log`, by which its processes are found, too.

    how: "zbpp", whose ranks are its own, or "torchrun", which starts them again `restarts` times.
    commands: the folder of the two commands.
    """

    def __init__(
        self,
        folder: Path,
        commands: Path,
        num_ranks: int,
        arguments: list[str],
        *,
        how: str = "zbpp",
        restarts: int = 0,
        environment: Mapping[str, str] | None = None,
        name: str = "first",
    ) -> None:
        self.misbehave, self.noticed = "{}", 0.0
        self.folder, self.num_ranks, self.log = folder, num_ranks, folder / f"{name}.log"
        for path in folder.glob("rank-*.pid"):
            path.unlink()
        inherited = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN}
        self.begin, taken = time.time(), socket.socket()
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        start = {
            "zbpp": [commands / "zbpp", "train", "-n", num_ranks],
            "torchrun": [
                commands / "torchrun", "--standalone", "--nproc-per-node", num_ranks, "--max-restarts",
                restarts, "--shutdown-timeout", 3, "--monitor-interval", 0.05, "-m", "zbpp.train",
            ],
            "torchrun, port in use": [
                commands / "torchrun", "--master-addr", "127.0.0.1", "--master-port", port,
                "--nproc-per-node", num_ranks, "-m", "zbpp.train",
            ],
            "without the last rank": ["sh", "-c", _BY_HAND, commands / "python"],
        }[how]  # fmt: skip
        if how == "torchrun, port in use":
            taken.listen()
            self._taken = taken  # until this job is forgotten
        else:
            taken.close()
        of_ranks = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if how == "without the last rank":
            inherited |= {**of_ranks, "NUM": str(num_ranks - 2), "LOCAL_WORLD_SIZE": str(num_ranks)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, start), *arguments],
                cwd=folder,
                env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pid(self, rank: int) -> int:
        """The process of a rank; waits until it has built its model."""
        path, end = self.folder / f"rank-{rank}.pid", time.monotonic() + 120
        while not path.exists() and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.002)
        return int(path.read_text())

    def alive(self) -> set[int]:
        """The processes of this job that have not ended: all whose output or error goes to its log."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                outputs = [os.readlink(folder / "fd" / number) for number in "12"]
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if str(self.log) in outputs and state != "Z":
                    found.add(int(folder.name))
        return found

    def text(self) -> str:
        """What the job has said."""
        return self.log.read_text(errors="replace")

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        """Wait until metrics.jsonl has the line of a step; TimeoutError, also if the job ends before."""
        end = time.monotonic() + timeout
        while self._num_lines() < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"the job did not reach step {step}:\n{self.text()[-3000:]}")
            time.sleep(0.002)

    def _num_lines(self) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def wait(self, timeout: float) -> float | None:
        """Wait until no process of the job is left; returns the time at which this was so, else None."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None and not self.alive():
                return time.time()
            time.sleep(0.02)
        return None

    def kill(self) -> None:
        """End what is left."""
        for _ in range(20):
            left = self.alive()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        self.process.wait()


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; none if the file is not there."""
    found = []
    with suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def curve_of(run: Path) -> list[tuple[Any, ...]]:
    """Steps, losses and norms."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines_of(run)]
