"""Ranks that die: who is named, what the others say, and where the run goes on, also with fewer ranks.

The ranks kill themselves at a step of their own, so nothing here depends on time. Other ways to die or to
stand still: test_faults.py.
"""

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from helpers.runs import curve
from zbpp import config as configs
from zbpp.run import app

ROOT = Path(__file__).parent.parent
RANKS, STEPS = 4, 24
MODEL = '''
import os, signal
from zbpp.models.mlp import Mlp

class Dies(Mlp):
    """In the first start, the owner of the last stage kills itself in the third microbatch of a step."""

    def __init__(self, *args, dies_in=0, **options):
        super().__init__(*args, **options)
        self.call, self.num_calls = 4 * (dies_in - 1) + 3, 0

    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if index == num_stages - 1 and is_first_start:
            stage.register_forward_hook(lambda *_: self.count())
        return stage

    def count(self):
        self.num_calls += 1
        if self.num_calls == self.call:
            os.kill(os.getpid(), signal.SIGKILL)
'''
RUN = [
    "model=mlp", "model._target_=dies.Dies", "model.num_layers=4", "data=regression", "schedule=zb_h1",
    "num_microbatches=4", "microbatch_size=2", f"steps={STEPS}", "checkpoint.every=8", "checkpoint.keep=9",
    "checkpoint.background=false",
    "evaluate_every=0", "save_weights=false", "measure_every=0", "parallel.device=cpu", "parallel.timeout=60",
    "precision=float64",
]  # fmt: skip
TWO_REPLICAS = [f"parallel.num_processes={RANKS}", "parallel.replicate=2"]

configs.register()


def composed(overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", overrides=overrides)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the model, from which this process imports it."""
    (tmp_path / "dies.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dies", raising=False)
    return tmp_path


def train(overrides):
    config = composed(overrides)
    return app.train(configs.Composed.of(config))


@pytest.mark.slow
def test_a_run_goes_on_after_a_death_with_all_ranks_or_with_fewer(here, warm, monkeypatch):
    torchrun = [
        str(warm.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
    ]  # fmt: skip
    runs = {}
    # The second has the default run_dir, with the time in it: torchrun's restart goes on in the same folder.
    for name, more in (
        ("whole", ["run_dir=whole"]),
        ("killed", ["++model.dies_in=11"]),
    ):
        command = [*torchrun, "--max-restarts", "1", "-m", "zbpp.train", *RUN, *TWO_REPLICAS, *more]
        done = warm.start(here, command)
        assert done.rc == 0, done.text
        runs[name] = done.text
    assert "error" not in runs["whole"]
    # Ranks 2 and 3, which have the last stage of the two replicas, die. torchelastic may end rank 0 or rank 1
    # before it has said why it stopped.
    told = [line for line in runs["killed"].splitlines() if line.startswith("error: ")]
    assert len(told) in (1, 2)
    assert all(line.startswith("error: rank 0, instruction ") for line in told)
    assert "Recv g(0," in told[0]
    assert "Connection" in told[0]
    assert "This is typically caused" not in told[0]
    assert "in step 11: `zbpp hang runs/" in runs["killed"]
    assert "exitcode: -9" in runs["killed"]
    (killed,) = here.glob("runs/*/*/metrics.jsonl")
    assert f"going on after step 8 of {killed.parent.relative_to(here)}/checkpoints/step-8" in runs["killed"]
    assert [step for step, *_ in curve(here / "whole")] == [*range(1, STEPS + 1)]
    assert curve(killed.parent) == curve(here / "whole")
    assert str(killed.parent.relative_to(here)) in (killed.parent / "config.yaml").read_text()

    # One process is left of four.
    monkeypatch.chdir(here)
    train([*RUN, "num_microbatches=8", "resume=whole/checkpoints/step-8", "run_dir=fewer"])
    after = curve(here / "whole")[8:]
    for ours, theirs in zip(curve(here / "fewer"), after, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
