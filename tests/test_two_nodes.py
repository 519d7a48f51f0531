"""Two torchrun agents, as on two nodes: one is killed with its rank and comes back, and the run goes on.

The rank itself says when: it writes its process id in the middle of a step, and waits to be killed.
"""

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from helpers.runs import curve

STEPS = 24
MODEL = '''
import os, time
from pathlib import Path
from zbpp.models.mlp import Mlp

class Waits(Mlp):
    """Where the environment says so, the third microbatch of step 11 never ends."""

    num_calls = 0

    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        if "TO_BE_KILLED" in os.environ:
            stage.register_forward_hook(lambda *_: self.count())
        return stage

    def count(self):
        self.num_calls += 1
        if self.num_calls == 4 * 10 + 3:
            Path("new").write_text(str(os.getpid()))
            Path("new").rename("pid")
            time.sleep(600)
'''
RUN = [
    "model=mlp", "model._target_=waits.Waits", "model.num_layers=4", "data=regression", "schedule=zb_h1",
    "num_microbatches=4", "microbatch_size=2", f"steps={STEPS}", "checkpoint.every=4", "evaluate_every=0",
    "save_weights=false", "measure_every=0", "parallel.device=cpu", "parallel.timeout=60",
    "precision=float64",
]  # fmt: skip


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(path, agents, seconds=150):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end
        assert all(agent.poll() is None for agent in agents)
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.nightly
def test_a_node_is_killed_and_comes_back(tmp_path, warm):
    (tmp_path / "waits.py").write_text(MODEL)
    whole = warm.start(tmp_path, warm.zbpp("train", "-n", "2", *RUN, "run_dir=whole"))
    assert whole.rc == 0, whole.text

    port, logs, agents = free_port(), [], []

    def start_agent(number, **more):
        # is_host: this agent holds the store. A node is missed after 6 heartbeats of 1 s.
        conf = f"is_host={'false' if number else 'true'},last_call_timeout=1,keep_alive_interval=1"
        command = [
            str(warm.python), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
            "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job",
            f"--rdzv-conf={conf},keep_alive_max_attempt=6", "-m", "zbpp.train", *RUN, "run_dir=run",
        ]  # fmt: skip
        logs.append((tmp_path / f"log-{len(logs)}").open("w"))
        environment = {**os.environ, **more, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=logs[-1], stderr=logs[-1])

    try:
        agents = [start_agent(0), start_agent(1, TO_BE_KILLED="1")]
        rank = int(wait_for(tmp_path / "pid", agents))
        agents[1].kill()
        os.kill(rank, signal.SIGKILL)
        agents[1].wait()
        agents[1] = start_agent(1)
        codes = [agent.wait(150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for log in logs:
            log.close()
    told = "".join((tmp_path / f"log-{number}").read_text() for number in range(len(logs)))
    assert codes == [0, 0], told
    # torchrun numbers the nodes.
    assert re.search(r"error: rank [01], instruction .* \(\w+ [xg]\(.* [01]\): ", told), told
    assert "in step 11: `zbpp hang run/failure`" in told
    assert "going on after step 8 of run/checkpoints/step-8" in told
    assert [step for step, *_ in curve(tmp_path / "run")] == [*range(1, STEPS + 1)]
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
