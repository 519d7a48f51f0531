"""`zbpp train -n 2` that is told to end: its ranks leave behind one step, and the job ends with 0."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_sigterm_to_the_process_that_started_the_ranks_ends_the_job_in_order(tmp_path):
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "zbpp", "train", "-n", "2", "model=mlp", "model.num_layers=4",
        "data=regression", "steps=1000000", "print_every=1", "evaluate_every=0", "parallel.device=cpu",
        "parallel.timeout=100",
        f"run_dir={run}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    ) as job:
        try:
            before = []
            while "  step 2/1000000  " not in "".join(before[-1:]):
                before.append(job.stdout.readline())
                assert before[-1], "".join(before)
            job.send_signal(signal.SIGTERM)
            after, _ = job.communicate(timeout=150)
        finally:
            job.kill()
    assert job.returncode == 0, after
    summary = json.loads((run / "summary.json").read_text())
    assert summary["left"] == "SIGTERM"
    assert summary["steps"] == len((run / "metrics.jsonl").read_text().splitlines()) >= 2
    assert f"left after step {summary['steps']}: SIGTERM; resume with resume=auto" in after
