"""metrics.jsonl survives a crash; wandb offline writes one real run per job, and needs no account."""

import importlib.util
import math
import time

import pytest
from matplotlib.image import imsave

from zbpp.training.loggers import JsonLines, Loggers, TensorBoard, Wandb

STEPS = [{"step": 1, "loss": 2.5, "note": "text"}, {"step": 2, "loss": 1.25, "note": "text"}]

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def test_numbers_that_json_cannot_write_are_texts_that_float_reads(tmp_path):
    """Strict readers refuse NaN; a diverged run is still readable."""
    logger = JsonLines(tmp_path)
    logger.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "skipped": True})
    logger.close({}, failed=False)
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "loss": "NaN", "grad_norm": "Infinity", "skipped": true}\n'


class Spy:
    def __init__(self):
        self.logged = []

    def log(self, metrics):
        self.logged.append(metrics)

    def close(self, summary, *, failed):
        """Nothing to do."""


class Full(Spy):
    def log(self, metrics):
        super().log(metrics)
        raise OSError("no space left")


def test_a_logger_whose_disk_is_full_gets_nothing_more_and_the_run_goes_on(capsys):
    spies = [Full(), Spy()]
    with Loggers(spies) as loggers:
        for metrics in STEPS:
            loggers.log(metrics)
    assert [spy.logged for spy in spies] == [STEPS[:1], STEPS]
    assert capsys.readouterr().out == "Full gets nothing more: no space left\n"


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    """No key in the environment or in a netrc, and nothing of wandb's outside the test's folder."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


def write(folder, mode):
    """A whole run: config, metrics, a picture, the summary."""
    imsave(folder / "timeline.png", [[0.0, 1.0], [1.0, 0.0]])
    with Loggers([Wandb(folder, project="test", mode=mode, config={"model.num_layers": 4})]) as loggers:
        for metrics in STEPS:
            loggers.log(metrics)
        loggers.picture("timeline", folder / "timeline.png", 1)
        loggers.summary = {"schedule": "zb_h1"}


def runs_in(folder):
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def written(path, last):
    """The file once `last` stands in it: wandb's own process may write a little after finish()."""
    deadline = time.monotonic() + 150
    while last not in (content := path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return content


@needs_wandb
def test_wandb_offline_writes_one_run_with_config_metrics_picture_and_summary(no_account, tmp_path):
    write(tmp_path, "offline")
    (run,) = runs_in(tmp_path)
    content = written(run, b"zb_h1")  # records of a known layout, but texts stand in them as they are
    for text in (b"model.num_layers", b"loss", b"2.5", b"1.25", b"schedule", b"zb_h1"):
        assert text in content, text
    assert b"note" not in content  # only numbers are metrics
    media = [path.name for path in run.parent.rglob("*") if path.is_file()]
    assert any(name.startswith("timeline") and name.endswith(".png") for name in media)


@needs_wandb
def test_a_run_that_goes_on_goes_on_in_its_wandb_run(no_account, tmp_path):
    """wandb joins parts by their id. A run that begins anew in the folder is another one."""
    found = []
    for goes_on in (False, True, False):
        Wandb(tmp_path, project="test", mode="offline", config={}, goes_on=goes_on).close({}, failed=False)
        found.append({path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")})
    assert [len(each) for each in found] == [1, 1, 2]


@needs_wandb
def test_wandb_online_without_a_key_goes_offline_and_says_so(no_account, tmp_path, capsys):
    write(tmp_path, "online")
    assert "logging offline, `wandb sync` later" in capsys.readouterr().out
    assert len(runs_in(tmp_path)) == 1


def test_tensorboard_has_metrics_pictures_and_texts(tmp_path):
    """Read back by TensorBoard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    imsave(tmp_path / "timeline.png", [[0.0, 1.0], [1.0, 0.0]])
    with Loggers([TensorBoard(tmp_path, config={"model.num_layers": 4})]) as loggers:
        for metrics in STEPS:
            loggers.log(metrics)
        loggers.picture("timeline", tmp_path / "timeline.png", 2)
        loggers.summary = {"schedule": "zb_h1"}
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 2.5), (2, 1.25)]
    assert found.Tags()["images"] == ["timeline"]
    texts = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]
    }
    assert "| model.num_layers | 4 |" in texts["config/text_summary"]
    assert "| schedule | zb_h1 |" in texts["summary/text_summary"]
