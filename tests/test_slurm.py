"""scripts/slurm.sh against a Slurm of shell scripts: it warns the ranks and requeues what they left."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/slurm.sh"

# Slurm sends a step's signal to all its processes.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
setsid "$@" &
group=$!
trap 'kill -USR1 -- -$group' USR1
while true; do
    status=0
    wait "$group" || status=$?
    kill -0 "$group" 2>/dev/null || exit "$status"
done
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$CALLS"
[[ $1 == show ]] && echo node-1 && echo node-2
exit 0
"""
PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit 0
exec "$REAL_PYTHON" "$TORCHRUN" "$@"
"""
# It dies of SIGUSR1 unless that is ignored, as torchrun does; its rank handles the signal.
TORCHRUN = """
import os, subprocess, sys
from pathlib import Path
rank = '''
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
Path(os.environ["READY"]).touch()
time.sleep(float(os.environ["SECONDS_OF_TRAINING"]))
sys.exit(int(os.environ["STATUS"]))
'''
sys.exit(subprocess.run([sys.executable, "-c", rank]).returncode)
"""


@pytest.fixture
def cluster(tmp_path):
    """Starts the script with a Slurm of its own; returns (process, calls so far)."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    started = []

    def start(*arguments, status=0, seconds=600.0):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "READY": str(tmp_path / "ready"),
            "TORCHRUN": str(tmp_path / "torchrun.py"),
            "REAL_PYTHON": sys.executable,
            "STATUS": str(status),
            "SECONDS_OF_TRAINING": str(seconds),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "64",
        }
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        deadline = time.monotonic() + 100
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return process, tmp_path / "calls"

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_slurms_warning_reaches_the_ranks_and_the_job_goes_back_into_the_queue(cluster):
    process, calls = cluster("schedule=zb_h1", "run_dir=a b")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 4711"
    assert "back into the queue" in out
    (started,) = [line for line in calls.read_text().splitlines() if line.startswith("srun")]
    assert "--rdzv-endpoint=node-1:19711" in started
    assert started.endswith("-m zbpp.train schedule=zb_h1 run_dir=a b")


@pytest.mark.parametrize(
    "left, is_requeued", [("null", False), ('"loss improved no more"', False), ('"SIGUSR1"', True)]
)
def test_a_run_that_finishes_after_the_warning_is_not_started_again(cluster, tmp_path, left, is_requeued):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/summary.json").write_text(f'{{\n  "steps": 8,\n  "left": {left}\n}}\n')
    process, calls = cluster("schedule=zb_h1", "run_dir=a run")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert ("scontrol requeue 4711" in calls.read_text()) == is_requeued
    assert ("the run is over" in out) != is_requeued


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_that_ends_by_itself_is_not_started_again(cluster, status):
    process, calls = cluster(status=status, seconds=0.1)
    process.communicate(timeout=100)
    assert process.returncode == status
    assert "requeue" not in calls.read_text()


def test_the_script_asks_slurm_for_the_warning_and_for_requeuing():
    asked = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --signal=B:USR1@300" in asked  # B: to the script alone, which tells the ranks
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(asked)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
