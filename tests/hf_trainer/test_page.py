"""Each diff of docs/from_trainer.md, applied to its script, trains what the script trains in one process."""

import csv
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from helpers.chat import write_files
from helpers.pages import ROOT, blocks, run_command

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PAGE = "docs/from_trainer.md"
SCRIPTS = {
    block.split("\n")[0].removeprefix("# "): place for place, block in enumerate(blocks(PAGE, "python"))
}
TORCHRUN = "torchrun --standalone --nproc-per-node 2"


def written(name, folder):
    """The folder with the script and with its changed form, piped.py."""
    script = blocks(PAGE, "python")[SCRIPTS[name]]
    changed = script
    for hunk in blocks(PAGE, "diff")[SCRIPTS[name]].split("...\n"):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        old, new = ("".join(f"{text}\n" for sign, text in lines if sign != other) for other in "+-")
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    folder.mkdir()
    write_files(folder)
    (folder / name).write_text(script)
    (folder / "piped.py").write_text(changed)
    return folder


def losses(printed):
    return [float(each) for each in re.findall(r"(?<!\w)'?loss'?:? '?([\d.]+)", printed)]


def assert_same_weights(one, other, tolerance):
    states = [load_file(each) for each in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, each in states[0].items():
        assert (states[1][name] - each).abs().max() <= tolerance * each.abs().max(), name


def without_measures(line):
    """A line without the figures that differ between runs."""
    return re.sub(r"(?<=measured bubble: )\d+|(?<=peak memory of the processes: ).*", "", line)


@pytest.mark.nightly
def test_the_trainers_script(tmp_path):
    alone, piped = (written("train.py", tmp_path / name) for name in ("alone", "piped"))
    expected = losses(run_command("python train.py", alone))
    (command,) = blocks(PAGE, "bash")
    printed = run_command(command.replace("train.py", "piped.py"), piped)
    assert len(expected) == 6
    assert losses(printed) == pytest.approx(expected, rel=2e-3)  # as printed
    (shown,) = (block for block in blocks(PAGE, "") if block.startswith("zbpp:"))
    said = [line for line in printed.splitlines() if line.startswith("zbpp:")]
    assert [without_measures(line) for line in said] == [*map(without_measures, shown.splitlines())]
    assert printed.count("'bubble'") == 6
    assert_same_weights(alone / "tuned/model.safetensors", piped / "tuned/model.safetensors", 1e-4)


def compared(name, owner, tmp_path):
    """Run a script that has the model or the pipeline in `owner` on two ranks, and in one process.

    Compares the weights; returns both folders, and what was printed in each.
    """
    alone, piped = (written(name, tmp_path / each) for each in ("alone", "piped"))
    with (alone / name).open("a") as script:
        script.write(f"\ntorch.save({owner}model.state_dict(), 'weights.pt')\n")
    with (piped / "piped.py").open("a") as script:
        rank = "torch.distributed.get_rank()"
        script.write(f"\ntorch.save({owner}pipeline.state_dict(), f'weights{{{rank}}}.pt')\n")
    printed = run_command(f"python {name}", alone), run_command(f"{TORCHRUN} piped.py", piped)
    whole = torch.load(alone / "weights.pt")
    parts = [torch.load(piped / f"weights{rank}.pt") for rank in range(2)]
    found = {**parts[0], **parts[1]}
    assert found.keys() == whole.keys()
    for key, each in whole.items():
        assert (found[key] - each).abs().max() <= 1e-5 * each.abs().max(), key
    return (alone, piped), printed


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["loop.py", "accelerated.py", "fabric.py"])
def test_a_loop_of_ones_own(name, tmp_path):
    if name == "fabric.py":
        pytest.importorskip("lightning")
    _, printed = compared(name, "", tmp_path)
    expected, found = map(losses, printed)
    assert len(expected) == 5
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
def test_lightnings_trainer(tmp_path):
    pytest.importorskip("lightning")
    folders, _ = compared("module.py", "module.", tmp_path)
    logs = []
    for folder in folders:
        (table,) = folder.glob("logs/*/version_0/metrics.csv")
        with table.open() as lines:
            logs.append(
                [{key: float(value or "nan") for key, value in row.items()} for row in csv.DictReader(lines)]
            )
    assert len(logs[0]) == len(logs[1]) == 12
    for one, other in zip(*logs, strict=True):
        assert one == pytest.approx(other, rel=1e-5, nan_ok=True)
    assert (folders[1] / "checkpoints/step-10").exists()


@pytest.mark.nightly
def test_trls_script_goes_on_after_it_was_killed(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    alone, piped = (written("sft.py", tmp_path / name) for name in ("alone", "piped"))
    expected = losses(run_command("python sft.py", alone))
    command = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN.split()[1:], "piped.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    how = {"cwd": piped, "env": environment, "stderr": subprocess.STDOUT}
    with (piped / "log").open("w") as log, subprocess.Popen(command, stdout=log, **how) as job:
        while not (piped / "runs/sft/checkpoint-4/trainer_state.json").exists():
            assert job.poll() is None, (piped / "log").read_text()
            time.sleep(0.05)
        job.terminate()  # torchrun ends its ranks, wherever they are
    printed = run_command(f"{TORCHRUN} piped.py", piped)
    assert len(expected) == 8
    assert losses(printed)[-4:] == pytest.approx(expected[-4:], rel=2e-3)
    names = "adapter/adapter_model.safetensors"
    assert_same_weights(alone / names, piped / names, 1e-3)
