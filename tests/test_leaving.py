"""`zbpp train -n 2` that is told to end: its ranks leave behind one step, and the job ends with 0."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@contextmanager
def job_of_two_ranks(run: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A job in a session of its own, and the lines that it has printed up to its second step."""
    command = [
        sys.executable, "-m", "zbpp", "train", "-n", "2", "model=mlp", "model.num_layers=4",
        "data=regression", "steps=1000000", "print_every=1", "evaluate_every=0", "parallel.device=cpu",
        "parallel.timeout=100", "resume=auto",
        f"run_dir={run}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            lines: list[str] = []
            while sum("/1000000  " in line for line in lines) < 2:
                lines.append(job.stdout.readline())
                assert lines[-1], "".join(lines)
            yield job, lines
        finally:
            for pid in processes_of(job.pid):
                os.kill(pid, signal.SIGKILL)


def processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.nightly
def test_a_signal_to_the_first_process_or_to_all_ends_the_job_in_order(tmp_path: Path) -> None:
    """Slurm sends a signal to each process, and so to the one that the ranks are forks of."""
    run = tmp_path / "run"
    steps = []
    for send in (os.kill, os.killpg):
        with job_of_two_ranks(run) as (job, _):
            send(job.pid, signal.SIGTERM)
            after, _ = job.communicate(timeout=150)
        assert job.returncode == 0, after
        summary = json.loads((run / "summary.json").read_text())
        assert summary["left"] == "SIGTERM"
        steps.append(summary["steps"])
        assert steps[-1] == len((run / "metrics.jsonl").read_text().splitlines()) >= 2 * len(steps)
        assert f"left after step {steps[-1]}: SIGTERM; resume with resume=auto" in after


def test_ranks_end_with_the_process_that_started_them() -> None:
    code = "import time; from zbpp.launch import on_ranks; on_ranks(2, time.sleep, 1000)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) as job:
        try:
            # The first process and two ranks.
            assert within(60, lambda: len(processes_of(job.pid)) >= 3)
            job.kill()
            assert within(60, lambda: not processes_of(job.pid))
        finally:
            for pid in processes_of(job.pid):
                os.kill(pid, signal.SIGKILL)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether this holds before the time is over."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()
