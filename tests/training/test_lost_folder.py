"""A full disk, and a run folder that is deleted in mid-run: nothing is lost in silence."""

import json
import os
import resource
import shutil
import signal
from contextlib import contextmanager

import pytest
from hydra import compose, initialize_config_dir

from helpers.installed import ROOT
from zbpp import config as configs
from zbpp.run import app
from zbpp.training.callbacks import Callback
from zbpp.training.folder import run_files
from zbpp.training.folder.run_files import FolderError, Record, write_whole
from zbpp.training.folder.run_folder import claimed

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


def test_a_record_keeps_what_a_full_disk_refuses_and_writes_it_later(tmp_path):
    said = []
    record = Record(tmp_path / "lines", said.append)
    record.add("first")
    with room_for(9):
        record.add("second")
        record.add("third")
        assert (tmp_path / "lines").read_text() == "first\n"  # no half of a line
        assert record.missing == ["second", "third"]
    record.add("fourth")
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\nfourth\n"
    assert len(said) == 2
    assert "lines could not be written (File too large): free space there" in said[0]
    with room_for(4):
        record.add("fifth")
        with pytest.raises(FolderError, match=r"lines could not be written .* are printed above"):
            record.close()
    assert said[-1].endswith("which could not be written:\nfifth")


def test_a_deleted_record_is_written_again_with_all_its_lines(tmp_path):
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    said = []
    record = Record(path, said.append)
    record.add("first")
    shutil.rmtree(path.parent)
    record.add("second")
    assert path.read_text() == "first\nsecond\n"
    path.unlink()
    path.write_text("an editor's\n")
    record.add("third")
    record.close()
    assert path.read_text() == "an editor's\nthird\n"
    assert [text.partition("lines was ")[2].partition(",")[0] for text in said[:1]] == ["deleted"]


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    write_whole(tmp_path / "file", "old")
    with room_for(4), pytest.raises(FolderError, match=r"file could not be written .*free space there; then"):
        write_whole(tmp_path / "file", "longer than four")
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FolderError, match="No such file"):
        write_whole(tmp_path / "none" / "file", "")


def test_a_folder_that_holds_another_run_now_is_not_written_to(tmp_path):
    path = tmp_path / "run"
    with claimed(path) as folder:
        folder.begin()
        shutil.rmtree(path)
        with claimed(path) as other:  # in this process the lock does not keep the other one out
            other.begin()
            (path / "job.json").write_text("of the other job")
            assert not folder.is_there()
            with pytest.raises(FolderError, match="holds another run now"):
                folder.make_again()
    assert (path / "job.json").read_text() == "of the other job"


class After(Callback):
    """Calls a function after a step."""

    def __init__(self, step, function):
        self._step, self._function = step, function

    def after_step(self, trainer, step, known):
        if step + 1 == self._step:
            self._function()


def train(monkeypatch, folder, *callbacks, **values):
    """A run of eight steps in this process, with further callbacks."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(app, "build_early_stop", lambda config: list(callbacks))
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
    return app.train(configs.typed(config), configs.flat(config), configs.as_yaml(config))


def curve(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def test_a_run_whose_folder_is_deleted_saves_itself_ends_and_goes_on(tmp_path, monkeypatch, capsys):
    train(monkeypatch, tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(FolderError, match="was deleted while the run was training.*resume=auto it goes on"):
        train(monkeypatch, run, After(4, lambda: shutil.rmtree(run)))
    assert curve(run) == curve(tmp_path / "whole")[:5]  # noticed behind the next step
    assert {"config.yaml", "job.json", "checkpoints", "summary.json"} <= set(os.listdir(run))
    train(monkeypatch, run)
    assert curve(run) == curve(tmp_path / "whole")
    assert "metrics.jsonl was deleted, and is written again" in capsys.readouterr().out


def test_a_run_trains_on_while_its_disk_is_full(tmp_path, monkeypatch, capsys):
    train(monkeypatch, tmp_path / "whole")
    run = tmp_path / "run"
    is_full = []

    def refuse(file, data, append=run_files._append):
        if is_full:
            raise OSError(28, "No space left on device")
        append(file, data)

    monkeypatch.setattr(run_files, "_append", refuse)
    train(monkeypatch, run, After(2, lambda: is_full.append(1)), After(6, is_full.clear))
    assert curve(run) == curve(tmp_path / "whole")
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl could not be written (No space left on device): free space there") == 1
    assert "metrics.jsonl is complete again" in said
    with pytest.raises(FolderError, match="its last lines are printed above"):
        train(monkeypatch, run, After(7, lambda: is_full.append(1)), overwrite="true")
    assert json.loads((run / "summary.json").read_text())["steps_missing_in_metrics"] == [7, 8]


def test_code_that_changes_the_current_folder_changes_nothing_in_the_run(tmp_path, monkeypatch, capsys):
    """The run was said to be deleted, and went on in another folder. Paths are shown as they were typed."""
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
