"""A run that is left and goes on has the losses of one that never stopped, to the last bit."""

import json
import threading

import pytest
import torch
from torch import nn

from helpers.processes import run_ranks
from zbpp import LossScale, MasterWeights, Pipeline, plan
from zbpp.checkpoints import CheckpointError
from zbpp.checkpoints.writing import FolderWriter
from zbpp.data import regression_data
from zbpp.training.callbacks import Callback
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.leaving import StopAfter
from zbpp.training.optim.optimizer import adamw
from zbpp.training.trainer import Trainer

STEPS, LEFT = 9, 5


class Noisy:
    """Layers with dropout and, in float32, a BatchNorm whose statistics are buffers."""

    def __init__(self, *, has_statistics):
        torch.manual_seed(0)
        self.layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.GELU()) for _ in range(8)]
        if has_statistics:
            for layer in self.layers[::3]:
                layer.append(nn.BatchNorm1d(6))

    def build_stage(self, index, num_stages):
        size = len(self.layers) // num_stages
        stage = nn.Sequential()
        for number in range(index * size, (index + 1) * size):
            stage.add_module(f"layer_{number}", self.layers[number])
        return stage

    def loss(self, output, target):
        return nn.functional.mse_loss(output.float(), target)


VARIANTS = {
    "float32 with BatchNorm": {},
    "mixed_float16": {"is_scaled": True},
    "post-validation": {"post_validation": True, "clip_norm": 0.3},
    "a scheduler of torch's": {"has_scheduler": True},
    "released gradients": {"gradient_release": True, "clip_norm": None},
    "mixed_float16 with post-validation": {"is_scaled": True, "post_validation": True},
}


def trainer_of(variant, rank=0, num_ranks=1, callbacks=()):
    options = {"clip_norm": 1.0, "gradient_release": False, **VARIANTS[variant]}
    is_scaled, has_scheduler = options.pop("is_scaled", False), options.pop("has_scheduler", False)
    model = Noisy(has_statistics=not is_scaled)
    timetable = plan("zb_v" if num_ranks == 1 else "zb_h1", num_ranks, 4)
    stages = {index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, model.loss)
    masters = MasterWeights(pipeline.parameters(), torch.float16) if is_scaled else None
    optimizer = adamw(
        (masters or pipeline).parameters(),
        learning_rate=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )
    return Trainer(
        pipeline=pipeline,
        optimizer=optimizer,
        data=regression_data(in_features=6, out_features=6, batch_size=8, seed=0),
        learning_rate=None if has_scheduler else lambda step: 1 / (1 + step),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS) if has_scheduler else None,
        masters=masters,
        # Overflows at first, is halved, and doubles again: before and after the checkpoint.
        loss_scale=LossScale(start=2.0**20, growth_interval=2) if is_scaled else None,
        num_recorded=0,
        callbacks=callbacks,
        **options,
    )


def checkpoints_in(folder, *, every=2, background=True):
    return Checkpoints(folder, every=every, keep=3, background=background, config={"seed": 0})


def losses_of(trainer):
    rows = [(each["step"], each["loss"], each.get("loss_scale")) for each in trainer.run(STEPS)]
    trainer.pipeline.close()
    return rows


def left_and_continued(rank, variant, num_ranks, folder):
    """(losses without a stop, losses of both starts)."""
    whole = losses_of(trainer_of(variant, rank, num_ranks))
    first = losses_of(
        trainer_of(variant, rank, num_ranks, callbacks=[checkpoints_in(folder), StopAfter(LEFT)])
    )
    checkpoints = checkpoints_in(folder)
    trainer = trainer_of(variant, rank, num_ranks, callbacks=[checkpoints])
    checkpoints.resume(trainer, folder, STEPS)
    return whole, first + losses_of(trainer)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_left_goes_on_to_the_last_bit(tmp_path, variant):
    whole, parts = left_and_continued(0, variant, 1, tmp_path)
    assert parts == whole
    assert [row[0] for row in whole] == list(range(1, STEPS + 1))


# Those in which ranks depend on each other: by the norm, by overflows, by updates that are taken back.
# A scheduler and released gradients are each rank's own.
ON_FOUR_RANKS = ["float32 with BatchNorm", "mixed_float16 with post-validation"]
AT_NIGHT = ["mixed_float16", "post-validation"]


def every_variant(rank, num_ranks, folder, variants):
    return [left_and_continued(rank, variant, num_ranks, folder / variant) for variant in variants]


@pytest.mark.parametrize("variants", [ON_FOUR_RANKS, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)])
def test_four_ranks_go_on_to_the_last_bit(tmp_path, variants):
    for found in run_ranks(every_variant, 4, 4, tmp_path, variants):
        for whole, parts in found:
            assert parts == whole


def test_a_checkpoint_changes_no_loss_and_the_newest_stay(tmp_path):
    whole = losses_of(trainer_of("float32 with BatchNorm"))
    for background in (True, False):
        folder = tmp_path / str(background)
        saved = trainer_of(
            "float32 with BatchNorm", callbacks=[checkpoints_in(folder, background=background)]
        )
        assert losses_of(saved) == whole
        assert {path.name for path in folder.iterdir()} == {"step-6", "step-8", "step-9"}


class Opens(Callback):
    """Lets a writer begin after a step."""

    def __init__(self, step):
        self.step, self.event = step, threading.Event()

    def after_step(self, trainer, step, known):
        if step == self.step:
            self.event.set()


def test_the_state_is_copied_before_training_goes_on(tmp_path, monkeypatch):
    """The writer in the background begins steps later, and writes the state of the step it was told."""
    gate, write = Opens(6), FolderWriter.write_data
    foreground, background = (
        checkpoints_in(tmp_path / str(is_late), every=4, background=is_late) for is_late in (False, True)
    )
    losses_of(trainer_of("mixed_float16", callbacks=[foreground]))
    monkeypatch.setattr(FolderWriter, "write_data", lambda *given: gate.event.wait(60) and write(*given))
    losses_of(trainer_of("mixed_float16", callbacks=[background, gate]))
    files = [(tmp_path / f"{name}/step-4/__0_0.distcp").read_bytes() for name in (False, True)]
    early, late = (zbpp_state(tmp_path / f"{name}/step-4") for name in (False, True))
    assert files[0] == files[1]
    assert early == late


def zbpp_state(path):
    state = json.loads((path / "state.json").read_text())
    return {key: state[key] for key in ("model", "optimizer", "states", "step")}


class Counts(Callback):
    """Has a state, a tensor, under a name of its own."""

    def __init__(self, key="count"):
        self.key, self.count = key, torch.tensor(0)

    def after_step(self, trainer, step, known):
        self.count = self.count + 1

    def state_dict(self):
        return {self.key: self.count}

    def load_state_dict(self, state):
        self.count = state[self.key]


def test_two_callbacks_of_one_class_are_told_apart(tmp_path):
    """The second of them counts from 100 on."""
    other = Counts()
    other.count = torch.tensor(100)
    first = trainer_of("a scheduler of torch's", callbacks=[Counts(), other, checkpoints_in(tmp_path)])
    first.callbacks = [*first.callbacks, StopAfter(3)]
    losses_of(first)

    def again(*callbacks):
        checkpoints = checkpoints_in(tmp_path / "again", every=0)
        trainer = trainer_of("a scheduler of torch's", callbacks=[*callbacks, checkpoints])
        checkpoints.resume(trainer, tmp_path, STEPS)
        losses_of(trainer)

    one, two = Counts(), Counts()
    again(one, two)
    assert [one.count, two.count] == [STEPS, STEPS + 100]
    with pytest.raises(CheckpointError, match="KeyError.*loaded in part"):
        again(Counts("number"))


def test_a_run_goes_on_with_validation_switched_on(tmp_path):
    """It was refused: the state of the update was one of another class."""
    before, after = "float32 with BatchNorm", "post-validation"
    losses_of(trainer_of(before, callbacks=[checkpoints_in(tmp_path), StopAfter(LEFT)]))
    checkpoints = checkpoints_in(tmp_path)
    trainer = trainer_of(after, callbacks=[checkpoints])
    checkpoints.resume(trainer, tmp_path, STEPS)
    assert len(losses_of(trainer)) == STEPS - LEFT
