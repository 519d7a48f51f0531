"""A run that was killed behind its last checkpoint does its end, and one that has ended is not run again."""

import json

import pytest

from zbpp.commands.train import main as train

COMMAND = [
    "model=mlp", "model.num_layers=4", "data=regression", "num_microbatches=2", "microbatch_size=4",
    "steps=4", "checkpoint.every=2", "evaluate_every=0", "save_weights=true", "parallel.device=cpu",
]  # fmt: skip


def test_a_run_that_was_killed_behind_its_last_checkpoint_does_its_end(tmp_path, monkeypatch, capfd):
    command = [*COMMAND, f"run_dir={tmp_path / 'run'}"]
    train(command)
    run = tmp_path / "run"
    metrics, weights = (run / "metrics.jsonl").read_bytes(), (run / "stage-0-of-1.safetensors").read_bytes()
    (run / "summary.json").unlink()
    (run / "stage-0-of-1.safetensors").unlink()

    train(command)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert (run / "stage-0-of-1.safetensors").read_bytes() == weights
    assert json.loads((run / "summary.json").read_text())["steps"] == 4

    with pytest.raises(SystemExit, match="^1$"):
        train(command)
    assert "step-4 has done 4 steps already: write steps=8" in capfd.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun: another rank died at the very end
    train(command)
    assert (run / "stage-0-of-1.safetensors").read_bytes() == weights
