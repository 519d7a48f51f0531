"""A full disk, and code that changes the current folder: nothing is lost in silence."""

import os
import resource
import signal
from contextlib import contextmanager

import pytest
from hydra import compose, initialize_config_dir

from helpers.installed import ROOT
from helpers.runs import curve
from zbpp import config as configs
from zbpp.run import app
from zbpp.run import trainer as trainer_of_run
from zbpp.training.callbacks import Callback
from zbpp.training.run_folder import FolderError, WriteError, write_whole

configs.register()


@contextmanager
def room_for(num_bytes):
    """Files may grow to so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    write_whole(tmp_path / "file", "old")
    again = rf"free space, then start the same command again with run_dir={tmp_path}: the run "
    with (
        room_for(4),
        pytest.raises(WriteError, match=f"file could not be written .*{again}begins again, since"),
    ):
        write_whole(tmp_path / "file", "longer than four")
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "checkpoints/step-20").mkdir(parents=True)
    with room_for(4), pytest.raises(WriteError, match=f"{again}goes on from step-20$"):
        write_whole(tmp_path / "file", "longer than four")
    with pytest.raises(WriteError, match="No such file"):
        write_whole(tmp_path / "none" / "file", "")


class After(Callback):
    """Calls a function after a step."""

    def __init__(self, step, function):
        self._step, self._function = step, function

    def after_step(self, trainer, step, known):
        if step + 1 == self._step:
            self._function()


def train(monkeypatch, folder, *callbacks, **values):
    """A run of eight steps in this process, with further callbacks."""
    monkeypatch.setattr(trainer_of_run, "build_own_callbacks", lambda config: list(callbacks))
    given = {
        "run_dir": folder,
        "steps": 8,
        "checkpoint.every": 3,
        "save_weights": "false",
        "checkpoint.background": "false",
        **values,
    }
    overrides = [
        "model=mlp",
        "model.num_layers=2",
        "data=regression",
        "evaluate_every=0",
        "parallel.device=cpu",
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", overrides=[*overrides, *(f"{key}={value}" for key, value in given.items())])
    return app.train(configs.Composed.of(config))


def test_code_that_changes_the_current_folder_changes_nothing_in_the_run(tmp_path, monkeypatch, capsys):
    """The run went on in another folder. Paths are shown as they were typed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    train(monkeypatch, tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    options = {"checkpoint.every": 2, "stop_after": 4}
    train(monkeypatch, "runs/one", After(2, lambda: os.chdir(elsewhere)), **options)
    monkeypatch.chdir(tmp_path)
    train(monkeypatch, "runs/one", After(6, lambda: os.chdir(elsewhere)))
    monkeypatch.chdir(tmp_path)
    assert curve(tmp_path / "runs/one") == curve(tmp_path / "whole")
    assert os.listdir(elsewhere) == []
    said = capsys.readouterr().out
    assert "going on after step 4 of runs/one/checkpoints/step-4" in said
    with pytest.raises(FolderError, match=r"^run_dir=runs/one holds a run already"):
        train(monkeypatch, "runs/one", resume="none")
