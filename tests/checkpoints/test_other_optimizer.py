"""resume_optimizer=false: a run goes on under another optimizer, which begins with fresh states."""

import shutil

import pytest
from hydra import compose, initialize_config_dir

from helpers.installed import ROOT
from helpers.runs import metrics_in
from zbpp import config as configs
from zbpp.checkpoints import CheckpointError
from zbpp.run import app

RUN = [
    "model=mlp", "model.num_layers=2", "data=regression", "num_microbatches=4", "microbatch_size=2",
    "evaluate_every=0", "measure_every=0", "save_weights=false", "parallel.device=cpu", "checkpoint.every=4",
]  # fmt: skip
MOMENTUM = [
    "optimizer=custom", "optimizer.build._target_=torch.optim.SGD", "optimizer.build.lr=0.1",
    "optimizer.build.momentum=0.9",
]  # fmt: skip

configs.register()


@pytest.fixture
def train(tmp_path):
    """Train in this process; returns {step: loss}."""

    def run(name, *overrides):
        folder = tmp_path / name
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train", overrides=[*RUN, *overrides, f"run_dir={folder}"])
        app.train(configs.Composed.of(config))
        return {row["step"]: row["loss"] for row in metrics_in(folder)}

    return run


def test_another_optimizer_goes_on_from_the_weights_and_then_from_its_own_states(tmp_path, train):
    train("adamw", "steps=4")
    for name in ("same", "whole", "parts"):
        shutil.copytree(tmp_path / "adamw", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"states of .*AdamW.* resume_optimizer=false"):
        train("whole", "steps=8", *MOMENTUM)

    other = ["steps=8", *MOMENTUM, "resume_optimizer=false"]
    same, whole = train("same", "steps=8"), train("whole", *other)
    assert (same[5], same[8] == whole[8]) == (whole[5], False)  # the loss of step 5 is that of the weights
    train("parts", *other, "stop_after=2")
    assert train("parts", *other) == whole  # the second start keeps the momentum of the first
