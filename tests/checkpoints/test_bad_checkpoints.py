"""Checkpoints that are damaged, of something else, or can't be written: never loaded in silence."""

import copyreg
import json
import os
import pickle
import re
import resource
import shutil
import threading
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

import zbpp
from helpers.processes import run_ranks
from helpers.trainers import small_trainer
from zbpp.checkpoints import CheckpointError, folders
from zbpp.checkpoints.reading import read_metadata
from zbpp.checkpoints.writing import _raising_os_error
from zbpp.training.checkpoints import Checkpoints, _check_rows
from zbpp.training.leaving import StopAfter
from zbpp.training.weights import weights_of_run


def pipeline_of(*sizes, names=None):
    stage = nn.Sequential()
    for number, (a, b) in enumerate(pairwise(sizes)):
        stage.add_module(names[number] if names else f"layer_{number}", nn.Linear(a, b))
    pipeline = zbpp.Pipeline({0: stage}, zbpp.plan("1f1b", 1, 2), nn.functional.mse_loss)
    return pipeline, torch.optim.AdamW(pipeline.parameters())


def train(pipeline, optimizer):
    sizes = [each.shape for each in pipeline.parameters() if each.dim() == 2]
    pipeline.step(torch.ones(4, sizes[0][1]), target=torch.ones(4, sizes[-1][0]))
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints of one model, of the steps 1 and 2."""
    pipeline, optimizer = pipeline_of(3, 4, 2)
    for step in (1, 2):
        train(pipeline, optimizer)
        zbpp.save(tmp_path, pipeline, optimizer, step=step)
    return tmp_path


def load(folder, **options):
    return zbpp.load(folder, *pipeline_of(3, 4, 2), **options)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut_off, os.unlink])
def test_a_damaged_checkpoint_is_passed_over_and_said(folder, capfd, name, damage):
    damage(folder / "step-2" / name)
    assert load(folder) == 1
    said = capfd.readouterr().out
    assert f"step-2 is damaged: {name}" in said
    assert f"going on from {folder / 'step-1'}" in said
    pipeline, optimizer = pipeline_of(3, 4, 2)
    zbpp.save(folder, pipeline, optimizer, step=2)  # its step can be saved again
    assert load(folder) == 2


def test_without_a_whole_one_nothing_is_loaded(folder):
    for step in (1, 2):
        cut_off(folder / f"step-{step}/__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"step-2 is damaged: .* bytes instead of .*step-1 is damaged"):
        load(folder)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(folder / "elsewhere")
    assert load(folder / "elsewhere", missing_ok=True) == 0


def test_what_a_dead_job_has_left_is_no_checkpoint(folder):
    shutil.copytree(folder / "step-2", folder / "step-3.tmp")
    assert load(folder) == 2
    zbpp.save(folder, *pipeline_of(3, 4, 2), step=3)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-1", "step-2", "step-3"]


def test_a_newer_format_is_not_taken_for_damage(folder):
    """Neither where a run goes on, nor where its weights are exported."""
    manifest = json.loads((folder / "step-2/manifest.json").read_text())
    (folder / "step-2/manifest.json").write_text(json.dumps({**manifest, "format": folders.FORMAT + 1}))
    with pytest.raises(
        CheckpointError, match=r"step-2 has format 2, .*a newer zbpp wrote it, so update zbpp"
    ):
        load(folder)
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (1, 2):
        (folder / f"step-{step}").rename(run / f"checkpoints/step-{step}")
    with pytest.raises(CheckpointError, match="a newer zbpp wrote it"):
        weights_of_run(run)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("it_ran",)


def test_loading_runs_no_code(folder, monkeypatch):
    """Not even from a checkpoint that somebody made on purpose, with the right sizes."""
    monkeypatch.chdir(folder)
    forged(folder / "step-2", ".metadata", pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match=r"\.metadata holds \w+\.mkdir, .* it was not loaded"):
        load(folder)
    assert not (folder / "it_ran").exists()


def test_a_checkpoint_of_another_model_names_the_tensors_that_differ(folder):
    before = pipeline_of(3, 5, 2)
    values = [each.clone() for each in before[0].parameters()]
    with pytest.raises(
        CheckpointError,
        match=r"another model: layer_0.weight is \[4, 3\] in the checkpoint and \[5, 3\] here; layer_0.bias",
    ):
        zbpp.load(folder, *before)
    assert all(map(torch.equal, values, before[0].parameters()))
    with pytest.raises(CheckpointError, match=r"first.weight is not in the checkpoint; .*and \d more"):
        zbpp.load(folder, *pipeline_of(3, 4, 2, names=["first", "second"]))


def test_names_that_depend_on_the_cut_are_said(tmp_path):
    def cut(num_stages):
        stages = {index: nn.Sequential(nn.Linear(3, 3)) for index in range(num_stages)}
        plan = zbpp.plan("zb_v" if num_stages == 2 else "1f1b", 1, 2)
        return zbpp.Pipeline(stages, plan, nn.functional.mse_loss)

    zbpp.save(tmp_path, cut(2), step=1)
    assert zbpp.load(tmp_path, cut(2)) == 1
    with pytest.raises(CheckpointError, match=r"names depend on the cut, .*written by 2 stages, not 1"):
        zbpp.load(tmp_path, cut(1))


def test_states_of_another_optimizer_are_refused(folder):
    pipeline, _ = pipeline_of(3, 4, 2)
    with pytest.raises(CheckpointError, match=r"has the states of torch.optim.adamw.AdamW .* is .*SGD"):
        zbpp.load(folder, pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1))
    next(iter(pipeline.parameters())).requires_grad_(False)
    rest = [each for each in pipeline.parameters() if each.requires_grad]
    zbpp.save(folder, pipeline, torch.optim.AdamW(rest), step=3)
    with pytest.raises(CheckpointError, match=r"no optimizer states for layer_0.weight, .* was it frozen\?"):
        load(folder)
    with pytest.raises(CheckpointError, match=r"has no state of scheduler; it has none beside"):
        load(folder / "step-2", scheduler=zbpp.LossScale())


def test_a_checkpoint_is_never_overwritten(folder):
    with pytest.raises(
        CheckpointError, match=r"step-2 exists already, and checkpoints are never overwritten"
    ):
        zbpp.save(folder, *pipeline_of(3, 4, 2), step=2)
    folders.check_sizes(folder / "step-2")


@contextmanager
def full_disk(num_bytes=2000):
    """No file can grow above so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_and_leaves_nothing(folder):
    with (
        full_disk(),
        pytest.raises(
            CheckpointError, match=r"step-3 could not be written \(OSError: \[Errno 27\] File too large\)"
        ),
    ):
        zbpp.save(folder, *pipeline_of(3, 4, 2), step=3)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]
    assert load(folder) == 2


def test_an_error_of_another_kind_keeps_its_cause():
    """It was raised `from None`."""
    with pytest.raises(ValueError, match="planted") as caught, _raising_os_error():
        raise ValueError("planted") from KeyError("cause")
    assert isinstance(caught.value.__cause__, KeyError)


def said_of_a_full_disk(rank, folder):
    pipeline = zbpp.Pipeline({rank: nn.Linear(200, 200)}, zbpp.plan("1f1b", 2, 2), nn.functional.mse_loss)
    # Above what the job's own store may grow to.
    with full_disk(100_000), pytest.raises(CheckpointError) as caught:
        zbpp.save(folder, pipeline, step=3)
    return str(caught.value)


def test_a_full_disk_is_said_on_all_ranks(tmp_path):
    """DCP sends the errors without their causes: it was "unexpected pos 704 vs 598"."""
    for said in run_ranks(said_of_a_full_disk, 2, tmp_path):
        assert said.endswith("step-3 could not be written (OSError: [Errno 27] File too large)")


class FullDisk(StopAfter):
    """The disk is full from one step to another one."""

    def __init__(self, first, last):
        self.range, self.limit = range(first, last), full_disk()

    def before_step(self, trainer, step):
        if step in (self.range.start, self.range.stop):
            for thread in threading.enumerate():
                if thread.name.startswith("zbpp"):  # what was begun before
                    thread.join()
        if step == self.range.start:
            self.limit.__enter__()
        if step == self.range.stop:
            self.limit.__exit__(None, None, None)

    def after_step(self, trainer, step, known):
        pass


@pytest.mark.parametrize("background", [True, False])
def test_a_run_goes_on_loudly_while_the_disk_is_full(tmp_path, capfd, background):
    whole = [each["loss"] for each in small_trainer().run(8)]
    saving = Checkpoints(tmp_path, every=2, keep=5, background=background, config={})
    trainer = small_trainer(callbacks=[FullDisk(3, 7), saving])
    assert [each["loss"] for each in trainer.run(8)] == whole
    said = capfd.readouterr().out
    for step in (4, 6):
        assert f"CHECKPOINT FAILED: {tmp_path / f'step-{step}'} could not be written" in said
    assert "training goes on, earlier checkpoints stay as they are" in said
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-8"}


def test_a_folder_that_can_not_be_written_stops_nobody_but_who_leaves(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    saving = Checkpoints(tmp_path / "file", every=2, keep=5, background=True, config={})
    assert len(list(small_trainer(callbacks=[saving]).run(5))) == 5
    assert "CHECKPOINT FAILED: " in capfd.readouterr().out
    saving = Checkpoints(tmp_path / "file", every=2, keep=5, background=True, config={})
    with pytest.raises(CheckpointError, match="step-3 can't be written"):
        list(small_trainer(callbacks=[saving, StopAfter(3)]).run(5))


def test_steps_of_another_size_are_refused(tmp_path):
    saving = Checkpoints(tmp_path, every=2, keep=5, background=True, config={})
    list(small_trainer(callbacks=[saving]).run(2))
    trainer = small_trainer()
    trainer.data = trainer.data._replace(items_per_batch=16)
    with pytest.raises(CheckpointError, match="trained on 8 rows per step, and this run has 16"):
        Checkpoints(tmp_path, every=2, keep=5, background=True, config={}).resume(trainer, tmp_path, 9)
    with pytest.raises(CheckpointError, match="has done 2 steps already: write steps=4"):
        saving.resume(small_trainer(), tmp_path, 2)


def test_a_run_that_has_gone_on_to_its_end_does_not_go_on_from_the_middle_again(tmp_path):
    options = {"every": 1000, "keep": 5, "background": True, "config": {}}
    list(small_trainer(callbacks=[Checkpoints(tmp_path, **options), StopAfter(2)]).run(4))
    saving, trainer = Checkpoints(tmp_path, **options), small_trainer()
    saving.resume(trainer, tmp_path, 4)
    trainer.callbacks = [saving]
    assert [each["step"] for each in trainer.run(4)] == [3, 4]
    with pytest.raises(CheckpointError, match="step-4 has done 4 steps already"):
        Checkpoints(tmp_path, **options).resume(small_trainer(), tmp_path, 4)


def names_in(folder):
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize(("key", "value"), [("step", "../../evil"), ("keep", 0)])
def test_step_and_keep_are_whole_numbers(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=f"{key}=.*: write how many"):
        zbpp.save(tmp_path / "new", *pipeline_of(3, 4, 2), **{"step": 1, key: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_written_stays_and_so_do_later_steps(tmp_path, keep):
    for step in (1, 10, 20):
        zbpp.save(tmp_path, *pipeline_of(3, 4, 2), step=step)
    assert zbpp.save(tmp_path, *pipeline_of(3, 4, 2), step=5, keep=keep).path.is_dir()
    assert names_in(tmp_path) == ["step-10", "step-20", "step-5"]


def forged(path, name, data):
    """Give a file other contents, with the right size."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = len(data)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (".metadata", b""),
        (".metadata", pickle.dumps("a")),
        ("state.json", b"{}"),
        ("state.json", b"{x"),
        ("state.json", b'{"step": "1; x"}'),
    ],
)
def test_files_that_zbpp_does_not_write_are_refused(folder, name, data):
    forged(folder / "step-2", name, data)
    with pytest.raises(CheckpointError, match="step-2"):
        load(folder)


@pytest.mark.parametrize("by_name", [True, False], ids=["3.11.0 to 3.11.3", "3.11.4 and newer"])
def test_metadata_of_every_python_is_read(tmp_path, by_name):
    """Python 3.11.2 writes builtins.getattr for a member of an enum; no checkpoint of it could be loaded."""
    enum = _MEM_FORMAT_ENCODING
    reduce = (
        (getattr, (enum, "TORCH_PRESERVE_FORMAT")) if by_name else (enum, (enum.TORCH_PRESERVE_FORMAT.value,))
    )
    properties = TensorProperties(memory_format=torch.preserve_format)
    written = Metadata({"a": TensorStorageMetadata(properties, torch.Size([2]), [])})
    with (tmp_path / ".metadata").open("wb") as file:
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = copyreg.dispatch_table | {enum: lambda _: reduce}
        pickler.dump(written)
    assert read_metadata(tmp_path / ".metadata") == written


@pytest.mark.parametrize("name", [".metadata", "state.json", "__0_0.distcp"])
def test_a_manifest_lists_every_file(folder, name, capfd):
    manifest = json.loads((folder / "step-2/manifest.json").read_text())
    del manifest["files"][name]
    (folder / "step-2/manifest.json").write_text(json.dumps(manifest))
    assert load(folder) == 1
    assert f"step-2 is damaged: manifest.json does not list {name}" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_a_file_that_can_not_be_read_is_no_damage(folder, monkeypatch, name):
    def refusing(method):
        def opened(self, *args, **options):
            if self.name == name:
                raise OSError(5, "Input/output error", str(self))
            return method(self, *args, **options)

        return opened

    for method in ("stat", "read_text"):
        monkeypatch.setattr(Path, method, refusing(getattr(Path, method)))
    with pytest.raises(CheckpointError, match=r"can't be read \(.*Input/output error"):
        load(folder)
    assert names_in(folder) == ["step-1", "step-2"]


def test_nothing_is_renamed_in_the_folder_of_another_run(tmp_path):
    first = Checkpoints(tmp_path / "first", every=2, keep=5, background=False, config={})
    list(small_trainer(callbacks=[first]).run(4))
    cut_off(tmp_path / "first/step-4/__0_0.distcp")
    second = Checkpoints(tmp_path / "second", every=2, keep=5, background=False, config={})
    trainer = small_trainer()
    second.resume(trainer, tmp_path / "first", 9)
    assert trainer.next_step == 2
    assert names_in(tmp_path / "first") == ["step-2", "step-4"]
    first.resume(small_trainer(), tmp_path / "first", 9)
    assert names_in(tmp_path / "first") == ["step-2", "step-4.damaged"]


def test_a_path_that_holds_no_checkpoint_is_said(folder, tmp_path):
    for missing_ok in (False, True):
        with pytest.raises(CheckpointError, match=r"step-99 does not exist; .* holds step-2, step-1"):
            load(folder / "step-99", missing_ok=missing_ok)
    (folder / "run").mkdir()
    shutil.copytree(folder / "step-2", folder / "run/checkpoints/step-2")
    assert load(folder / "run", missing_ok=True) == 2


ROWS, TOKENS, THOUSAND = {}, {"data.batching": "tokens"}, {"items_per_step": 1000, "unit": "tokens"}
SIZE = "so that num_microbatches x microbatch_size x parallel.replicate x parallel.shard is what it was"


@pytest.mark.parametrize(
    ("before", "now", "items", "told"),
    [
        (ROWS, ROWS, 1000, None),
        (TOKENS, TOKENS, 1000, None),
        (ROWS, ROWS, 2000, f"write num_microbatches=... or microbatch_size=... {SIZE}"),
        (TOKENS, TOKENS, 2000, "write data.tokens_per_batch=1000"),
        (TOKENS, ROWS, 1000, "write data.batching=tokens data.tokens_per_batch=1000"),
        (ROWS, TOKENS, 1000, f"write data.batching=rows num_microbatches=... or microbatch_size=... {SIZE}"),
    ],
)
def test_a_run_that_would_read_other_batches_is_refused(before, now, items, told):
    """Batches of rows went on as batches of tokens where a step had as many of each."""
    facts = THOUSAND | {"fingerprint": "", "config": before, "is_replanned": False}
    found = SimpleNamespace(path="step-5", facts={"info": facts})
    trainer = SimpleNamespace(items_per_step=items)
    refused = nullcontext() if told is None else pytest.raises(CheckpointError, match=f"{re.escape(told)}$")
    with refused:
        _check_rows(found, trainer, now)
