"""Each diff of docs/from_trainer.md, applied to its script, trains what the script trains in one process."""

import os
import re
import subprocess
import sys
import time

import pytest
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["loop.py", "accelerated.py"])
def test_a_loop_of_ones_own(name, tmp_path):
    folder = written(name, tmp_path / "loop")
    expected = losses(run_command(f"python {name}", folder))
    assert len(expected) == 5
    assert losses(run_command(f"{TORCHRUN} piped.py", folder)) == pytest.approx(expected, rel=1e-5)


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
