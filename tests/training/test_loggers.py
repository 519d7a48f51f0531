"""metrics.jsonl survives a crash; wandb offline writes one real run per job, and needs no account."""

import importlib.util
import json
import math
import time

import pytest

from zbpp.training.loggers import JsonLines, Loggers, Wandb

STEPS = [{"step": 1, "loss": 2.5, "note": "text"}, {"step": 2, "loss": 1.25, "note": "text"}]

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def test_each_step_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonLines(path)
    for number, metrics in enumerate(STEPS, 1):
        logger.log(metrics)
        assert [json.loads(line) for line in path.read_text().splitlines()] == STEPS[:number]
    logger.close({}, failed=False)


def test_a_number_that_json_cannot_write_is_null(tmp_path):
    """Strict readers refuse NaN; a diverged run is still readable."""
    path = tmp_path / "metrics.jsonl"
    logger = JsonLines(path)
    logger.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "skipped": True})
    logger.close({}, failed=False)
    assert path.read_text() == '{"step": 1, "loss": null, "grad_norm": null, "skipped": true}\n'


class Spy:
    def __init__(self):
        self.logged, self.closed = [], []

    def log(self, metrics):
        self.logged.append(metrics)

    def close(self, summary, *, failed):
        self.closed.append((summary, failed))


class Broken(Spy):
    def close(self, summary, *, failed):
        raise OSError("disk full")


def test_several_loggers_get_the_same_and_are_closed_with_the_summary():
    spies = [Spy(), Spy()]
    with Loggers(spies) as loggers:
        for metrics in STEPS:
            loggers.log(metrics)
        loggers.summary = {"loss": 1.25}
    assert [(spy.logged, spy.closed) for spy in spies] == [(STEPS, [({"loss": 1.25}, False)])] * 2


def test_loggers_are_closed_when_a_run_fails():
    spy = Spy()

    def fail():
        with Loggers([spy]) as loggers:
            loggers.log(STEPS[0])
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail()
    assert spy.closed == [({}, True)]


def test_each_logger_is_closed_even_if_another_cannot_be():
    spies = [Spy(), Broken(), Spy()]
    with pytest.raises(OSError, match="disk full"), Loggers(spies):
        pass
    assert [len(spy.closed) for spy in spies] == [1, 0, 1]


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    """No key in the environment or in a netrc, and nothing of wandb's outside the test's folder."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


def write(folder, mode):
    with Loggers([Wandb(folder, project="test", mode=mode, config={"model.num_layers": 4})]) as loggers:
        for metrics in STEPS:
            loggers.log(metrics)
        loggers.summary = {"schedule": "zb_h1"}


def runs_in(folder):
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def written(path, last):
    """The file once `last` stands in it: wandb's own process may write a little after finish()."""
    deadline = time.monotonic() + 60
    while last not in (content := path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return content


@needs_wandb
def test_wandb_offline_writes_one_run_with_config_metrics_and_summary(no_account, tmp_path):
    write(tmp_path, "offline")
    (run,) = runs_in(tmp_path)
    content = written(run, b"zb_h1")  # records of a known layout, but texts stand in them as they are
    for text in (b"model.num_layers", b"loss", b"2.5", b"1.25", b"schedule", b"zb_h1"):
        assert text in content, text
    assert b"note" not in content  # only numbers are metrics


@needs_wandb
def test_wandb_online_without_a_key_goes_offline_and_says_so(no_account, tmp_path, capsys):
    write(tmp_path, "online")
    assert "no API key here; logging offline, `wandb sync` later" in capsys.readouterr().out
    assert len(runs_in(tmp_path)) == 1


@needs_wandb
def test_wandb_disabled_writes_nothing(no_account, tmp_path):
    write(tmp_path, "disabled")
    assert runs_in(tmp_path) == []
