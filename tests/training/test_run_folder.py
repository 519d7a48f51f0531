"""A run's folder is never shared, overwritten or mixed in silence."""

import json
import multiprocessing
import os
import signal

import pytest

from zbpp.training.run_folder import FolderError, check_free, claimed


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """Every test is a job of its own; nobody's Slurm shows."""
    for name in (
        "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run(folder, text, *, finished=True, **options):
    """A run that writes `text` as its metrics."""
    with claimed(folder, **options) as mine:
        mine.begin()
        (folder / "metrics.jsonl").write_text(text)
        if finished:
            (folder / "summary.json").write_text("{}")


def _hold(folder, started):
    with claimed(folder) as mine:
        mine.begin()
        (folder / "metrics.jsonl").write_text("of the first job")
        started.send(os.getpid())
        signal.pause()


@pytest.fixture
def other_job(tmp_path):
    """A process that is using the folder."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_hold, args=(tmp_path / "run", sender))
    process.start()
    receiver.recv()
    yield process
    process.kill()
    process.join()


def test_a_second_job_on_a_folder_in_use_is_refused_and_changes_nothing(tmp_path, other_job):
    folder = tmp_path / "run"
    before = contents(folder)
    for overwrite in (False, True):
        with (
            pytest.raises(FolderError, match=f"is in use by process {other_job.pid} on .* since 20"),
            claimed(folder, overwrite=overwrite),
        ):
            pass
    assert contents(folder) == before


def test_a_dead_owners_lock_blocks_nobody(tmp_path, other_job):
    folder = tmp_path / "run"
    other_job.kill()
    other_job.join()
    assert (folder / ".lock").exists()
    run(folder, "of the second job", overwrite=True)
    assert (folder / "metrics.jsonl").read_text() == "of the second job"
    assert not (folder / ".lock").exists()


def test_a_folder_that_holds_a_run_is_refused_and_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    run(folder, "first")
    before = contents(folder)
    for refused in (lambda: run(folder, "second"), lambda: check_free(folder)):
        with pytest.raises(
            FolderError, match="holds a run already: write another run_dir, or overwrite=true"
        ):
            refused()
    assert contents(folder) == before


def test_overwriting_waits_until_the_new_run_begins(tmp_path):
    """A mistake that shows after the folder was claimed must not cost the old run."""
    folder = tmp_path / "run"
    run(folder, "first")
    before = contents(folder)
    with pytest.raises(ZeroDivisionError), claimed(folder, overwrite=True):
        raise ZeroDivisionError
    assert contents(folder) == before
    (folder / "trace.json").write_text("old")
    (folder / "notes.txt").write_text("not of a run")
    run(folder, "second", overwrite=True)
    assert contents(folder) == {
        "job.json": contents(folder)["job.json"],
        "metrics.jsonl": "second",
        "notes.txt": "not of a run",
        "summary.json": "{}",
    }


def checkpoint(folder, step):
    (folder / f"checkpoints/step-{step}").mkdir(parents=True)


def begun(folder, steps, step=0, **options):
    """A run that goes on after `step`, and dies after `steps`; returns where it found checkpoints."""
    with claimed(folder, **options) as mine:
        mine.begin(step)
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(f'{{"step": {number}}}\n' for number in steps)
        return mine.source


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_with_checkpoints_goes_on_in_the_same_files(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    begun(folder, [1, 2, 3])
    checkpoint(folder, 2)
    (folder / "checkpoints/step-4.tmp").mkdir()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the job died here
    (folder / "job.json").write_text(json.dumps({"job": "another one"}))
    with pytest.raises(FolderError, match="holds a run already"):
        begun(folder, [])
    assert begun(folder, [3, 4], step=2, resume="auto") == folder / "checkpoints"
    assert steps_in(folder / "metrics.jsonl") == [1, 2, 3, 4]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]


def test_an_earlier_checkpoint_of_a_run_is_refused_until_the_later_ones_are_gone(tmp_path):
    folder = tmp_path / "run"
    begun(folder, [1, 2, 3, 4])
    checkpoint(folder, 2)
    checkpoint(folder, 4)
    source = folder / "checkpoints/step-2"
    with pytest.raises(FolderError, match="holds later checkpoints .* or remove step-4"):
        begun(folder, [3], step=2, resume=str(source))
    (folder / "checkpoints/step-4").rmdir()
    (folder / "summary.json").write_text("{}")
    assert begun(folder, [3], step=2, resume=str(source)) == source
    assert steps_in(folder / "metrics.jsonl") == [1, 2, 3]
    assert not (folder / "summary.json").exists()


def test_weights_of_a_run_that_was_left_are_not_taken_for_those_of_the_run_that_goes_on(tmp_path):
    """It may have another number of stages, be killed, or train other parameters."""
    folder = tmp_path / "run"
    begun(folder, [1, 2, 3])
    checkpoint(folder, 3)
    (folder / "stage-0-of-2.safetensors").write_text("of step 3")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_model.safetensors").write_text("of step 3")
    begun(folder, [], step=3, resume="auto")
    assert list(folder.rglob("*.safetensors")) == []


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path):
    folder = tmp_path / "run"
    begun(folder, [1, 2])
    (folder / "job.json").write_text(json.dumps({"job": "another one"}))
    assert begun(folder, [1], resume="auto") is None
    assert steps_in(folder / "metrics.jsonl") == [1]


@pytest.mark.parametrize("restart", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("summary", [None, '{"left": "SIGUSR1"}'])
def test_overwrite_keeps_the_checkpoints_of_its_own_restart(tmp_path, monkeypatch, restart, summary):
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    begun(folder, [1, 2])
    checkpoint(folder, 2)
    if summary:
        (folder / "summary.json").write_text(summary)
    monkeypatch.setenv(restart, "1")
    assert begun(folder, [3], step=2, resume="auto", overwrite=True) == folder / "checkpoints"
    assert steps_in(folder / "metrics.jsonl") == [1, 2, 3]


@pytest.mark.parametrize("job, summary", [("17", None), ("17", '{"left": null}'), ("18", None)])
def test_overwrite_replaces_every_other_run_even_in_the_same_allocation(tmp_path, monkeypatch, job, summary):
    """Two commands in one salloc have one job's name."""
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    begun(folder, [1, 2])
    checkpoint(folder, 2)
    if summary:
        (folder / "summary.json").write_text(summary)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    assert begun(folder, [1], resume="auto", overwrite=True) is None
    assert steps_in(folder / "metrics.jsonl") == [1]
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("stump", ['{"step": 3, "lo', '{"step": 3}', '{"step": 3, "text": "\u00e4'])
def test_a_line_that_was_cut_off_costs_no_step(tmp_path, stump):
    folder = tmp_path / "run"
    begun(folder, [1, 2])
    checkpoint(folder, 2)
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + stump.encode()[:-1])
    begun(folder, [3], step=2, resume="auto")
    assert steps_in(folder / "metrics.jsonl") == [1, 2, 3]


def test_a_restart_goes_on_from_its_own_checkpoints_not_from_those_it_began_with(tmp_path, monkeypatch):
    begun(tmp_path / "first", [1, 2])
    checkpoint(tmp_path / "first", 2)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder, options = tmp_path / "second", {"resume": str(tmp_path / "first")}
    assert begun(folder, [3, 4], step=2, **options) == tmp_path / "first/checkpoints"
    checkpoint(folder, 4)
    (folder / "summary.json").write_text('{"left": "SIGUSR1"}')
    assert begun(folder, [5], step=4, **options) == folder / "checkpoints"
    assert steps_in(folder / "metrics.jsonl") == [3, 4, 5]


def test_checkpoints_of_another_run_begin_a_new_run(tmp_path):
    begun(tmp_path / "first", [1, 2])
    checkpoint(tmp_path / "first", 2)
    assert begun(tmp_path / "second", [3], step=2, resume=str(tmp_path / "first")) == (
        tmp_path / "first/checkpoints"
    )
    assert steps_in(tmp_path / "second/metrics.jsonl") == [3]
    with pytest.raises(FolderError, match="resume=.*nowhere holds no checkpoint: write a run's folder"):
        check_free(tmp_path / "third", resume=str(tmp_path / "nowhere"))
