"""Callbacks of the Trainer: when they are called, what they may read and add, and leaving early."""

import json
import math

import pytest
import torch

from helpers.configs import composed
from helpers.trainers import small_trainer
from zbpp.config import ConfigError
from zbpp.run.callbacks import build_own_callbacks
from zbpp.training.callbacks import Callback
from zbpp.training.loggers import JsonLines, Loggers


class Witness(Callback):
    """Notes its calls, and the steps whose metrics it was shown; leaves after a step, if told to."""

    def __init__(self, *, needy_step=None, last_step=None):
        self.calls, self.shown = [], {}
        self.needy_step, self.last_step = needy_step, last_step

    def needs_weights(self, step):
        return step == self.needy_step

    def before_step(self, trainer, step):
        self.calls.append(("before", step))

    def after_step(self, trainer, step, known):
        self.calls.append(("after", step))
        self.shown[step] = [metrics["step"] for metrics in known]
        if step == self.last_step:
            trainer.leave("enough")

    def finish(self, trainer):
        self.calls.append(("finish", trainer.next_step))


def test_callbacks_are_called_around_each_step_and_once_at_the_end():
    witness = Witness()
    steps = [metrics["step"] for metrics in small_trainer(callbacks=[witness]).run(3)]
    assert steps == [1, 2, 3]
    assert witness.calls == [
        *[(when, step) for step in range(3) for when in ("before", "after")],
        ("finish", 3),
    ]


def test_a_callback_ends_the_run_and_a_second_run_continues_it():
    whole = [metrics["loss"] for metrics in small_trainer().run(6)]
    trainer = small_trainer(callbacks=[Witness(last_step=2)])
    first = [metrics["loss"] for metrics in trainer.run(6)]
    assert (len(first), trainer.leaving, trainer.next_step) == (3, "enough", 3)
    assert first + [metrics["loss"] for metrics in trainer.run(6)] == whole


@pytest.mark.parametrize("last_step", [None, 3])
def test_with_post_validation_only_a_callback_that_needs_the_weights_is_shown_its_own_step(last_step):
    witness = Witness(needy_step=2, last_step=last_step)
    trainer = small_trainer(callbacks=[witness], post_validation=True, clip_norm=2.0, num_recorded=0)
    steps = [metrics["step"] for metrics in trainer.run(6)]
    assert witness.shown[2][-1] == 3
    assert witness.shown[1] == [1]
    assert steps == list(range(1, len(steps) + 1)) == list(range(1, 7 if last_step is None else 5))


class Adds(Callback):
    """Changes the metrics of each step as the function says."""

    def __init__(self, change):
        self.change = change

    def after_step(self, trainer, step, known):
        for metrics in known:
            self.change(metrics)


def test_a_tensor_that_a_callback_adds_is_written_as_its_number(tmp_path):
    given = {"tensor": torch.tensor([[2.5]], requires_grad=True), "flag": torch.tensor(True), "nan": math.nan}
    (metrics,) = small_trainer(callbacks=[Adds(lambda each: each.update(given))]).run(1)
    with Loggers([JsonLines(tmp_path)]) as loggers:
        loggers.log(metrics)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [written[key] for key in given] == [2.5, True, "NaN"]


class Foreign:
    """No Callback."""


def number():
    """Makes no Callback, too."""
    return 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{_target_: Wittness}]", r"callbacks\[0\] \(.*Wittness\): .* has no attribute 'Wittness'"),
        ("[{_target_: Foreign}]", r"callbacks\[0\] .*: the call returns a Foreign, not a .*Callback: derive"),
        ("[{_target_: number}]", r"callbacks\[0\] .*: the call returns an int, not a .*Callback: derive"),
        ("[{_target_: Witness, last: 3}]", r"callbacks\[0\]\.last: Witness has no argument last"),
        ("[3]", r"callbacks\[0\]=3: write a class of yours as \{_target_: my_file.MyCallback\}"),
    ],
)
def test_the_config_names_callbacks_and_a_wrong_one_is_refused(text, words):
    def built(text):
        return build_own_callbacks(
            composed("callbacks=" + text.replace("_target_: ", f"_target_: {__name__}."))
        )

    (witness, other) = built("[{_target_: Witness, last_step: 2}, {_target_: Witness}]")
    assert (witness.last_step, other.last_step) == (2, None)
    with pytest.raises(ConfigError, match=words):
        built(text)
