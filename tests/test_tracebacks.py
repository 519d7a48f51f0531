"""A traceback shows the user's lines; zbpp's stay on demand, and where the error is a bug of zbpp's."""

import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zbpp
from helpers.installed import ROOT
from zbpp import tracebacks
from zbpp.runtime.stage import StageWorker

X = torch.ones(4, 4)


class Inner(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        raise KeyError("planted")


class Tower:
    def __init__(self, last=None, loss=F.mse_loss):
        self.last, self.loss = last or nn.Linear(4, 4), loss

    def build_stage(self, index, num_stages):
        return zbpp.split_sequential(nn.Sequential(nn.Linear(4, 4), self.last), num_stages)[index]


class Unbuilt(Tower):
    def build_stage(self, index, num_stages):
        raise OSError("no such weights")


def bad_label(output, target):
    return F.cross_entropy(output, torch.full((len(output),), 9))


def detached(output, target):
    return F.mse_loss(output.detach(), target)


def frames(error):
    """The functions of the frames in this file, and how many frames are zbpp's."""
    entries = traceback.extract_tb(error.__traceback__)
    own = [each for each in entries if Path(each.filename).is_relative_to(ROOT / "zbpp")]
    return [each.name for each in entries if each.filename == __file__], len(own)


def error_of(model):
    with pytest.raises(Exception, match=".") as caught:
        zbpp.Pipeline(model, "zb_h1", num_microbatches=2).step(X, target=X)
    return caught.value


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    monkeypatch.setattr(tracebacks, "_OWN", str(ROOT / "zbpp") + "/")
    monkeypatch.delenv("ZBPP_TRACEBACK", raising=False)


CASES = [
    (Tower(Inner()), KeyError, ["forward", "helper"]),
    (Tower(loss=bad_label), IndexError, ["bad_label"]),
    (Tower(loss=detached), ValueError, []),
    (Tower, ValueError, []),
    (Unbuilt(), ValueError, []),
]


@pytest.mark.parametrize(("model", "kind", "lines"), CASES)
def test_a_traceback_shows_the_users_lines_and_none_of_zbpps(model, kind, lines):
    error = error_of(model)
    assert isinstance(error, kind)
    assert frames(error) == (["error_of", *lines], 0)


CALLS = {
    "plan": lambda folder: zbpp.plan("zb_h3", 2, 4),
    "split_sequential": lambda folder: zbpp.split_sequential(nn.Sequential(nn.Linear(4, 4)), 2),
    "trace_stages": lambda folder: zbpp.trace_stages(nn.Linear(4, 4), X, ["absent"]),
    "save": lambda folder: zbpp.save(folder, pipeline_of_one(), step=-1),
    "load": lambda folder: zbpp.load(folder, pipeline_of_one()),
}


def pipeline_of_one():
    return zbpp.Pipeline({0: nn.Linear(4, 4)}, "zb_h1", num_microbatches=2, loss_fn=F.mse_loss)


@pytest.mark.parametrize("name", CALLS)
def test_functions_beside_the_pipeline_show_none_of_zbpps_lines(tmp_path, name):
    with pytest.raises(Exception, match=".") as caught:
        CALLS[name](tmp_path)
    assert isinstance(caught.value, ValueError | RuntimeError)
    name_of_test = "test_functions_beside_the_pipeline_show_none_of_zbpps_lines"
    assert frames(caught.value) == ([name_of_test, "<lambda>"], 0)


def test_the_cause_keeps_the_users_lines():
    cause = error_of(Unbuilt()).__cause__
    assert isinstance(cause, OSError)
    assert frames(cause) == (["build_stage"], 0)


def test_all_frames_stay_in_a_bug_of_zbpps(monkeypatch):
    monkeypatch.setattr(StageWorker, "_given", None)  # zbpp's call of it fails
    assert frames(error_of(Tower(nn.Linear(3, 3))))[1] > 4


def test_all_frames_stay_on_demand(monkeypatch):
    monkeypatch.setenv("ZBPP_TRACEBACK", "1")
    assert frames(error_of(Tower(Inner())))[1] > 4
