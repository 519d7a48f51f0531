"""The policies for NaN and infinite values, against loops of plain torch over the whole model."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import LossScale, Pipeline, make_mesh, plan
from zbpp.checkpoints import CheckpointError
from zbpp.data import Data, loaded_data
from zbpp.training import non_finite
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.loggers import finite
from zbpp.training.non_finite import NonFiniteError
from zbpp.training.trainer import Trainer

M, ROWS, WIDTH, STEPS, BAD = 4, 8, 5, 6, 2  # BAD: the step (from 0) whose batch is spoiled


class Batches:
    """Random rows. spoil: what is wrong with the third row of step BAD of data part `part`."""

    def __init__(self, spoil="", part=0, num_parts=1):
        self.spoil, self.bad = spoil, BAD * num_parts + part

    def batch(self, number):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        if number == self.bad or (self.spoil and number >= self.bad and self.spoil == "ever"):
            match self.spoil:
                case "nan" | "ever":
                    x[2, 0] = math.nan
                case "loss":  # the loss alone: see loss_of
                    y[2, 0] = 1e9
        return x, y


def loss_of(output, target):
    """Mean squares; infinite, with finite gradients, where a target is a billion."""
    is_bad = target == 1e9
    return F.mse_loss(output, target.masked_fill(is_bad, 0)) + (math.inf if bool(is_bad.any()) else 0)


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2)]


def stage_of(index):
    stage = nn.Sequential()
    stage.add_module(f"layer{index}", layers()[index])
    return stage


def trainer_of(batches, schedule="zb_v", num_ranks=1, mesh=None, make_optimizer=torch.optim.AdamW, **options):
    timetable = plan(schedule, num_ranks, M)
    rank = 0 if num_ranks == 1 else torch.distributed.get_rank()
    stages = {stage: stage_of(stage) for stage in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, loss_of, mesh=mesh)
    optimizer = make_optimizer(pipeline.parameters(), lr=0.05)
    return Trainer(
        pipeline=pipeline,
        optimizer=optimizer,
        data=Data(batches, batches, 0, ROWS, None, unit="rows"),
        learning_rate=lambda step: 1.0,
        num_recorded=0,
        **options,
    )


def weights(trainer):
    return {name: each.detach().clone() for name, each in trainer.pipeline.named_parameters()}


def run(trainer):
    """(metrics of the steps, the error or None)."""
    history = []
    try:
        for metrics in trainer.run(STEPS):
            history.append(metrics)  # what there is when it raises
    except NonFiniteError as error:
        return history, str(error)
    return history, None


def plain(batches, *, skip=()):
    """Weights after a loop of plain torch, which leaves out the updates of the steps in `skip`."""
    whole = nn.Sequential()
    for index, layer in enumerate(layers()):
        whole.add_module(f"layer{index}", layer)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batches.batch(step)
        optimizer.zero_grad()
        loss_of(whole(x), y).backward()
        if step not in skip:
            optimizer.step()
    return dict(whole.named_parameters())


def assert_close(found, expected):
    assert found.keys() <= expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("spoil, loss", [("nan", "NaN"), ("loss", "Infinity")])
@pytest.mark.parametrize("validation", [False, True])
def test_skip_leaves_out_the_update_and_nothing_else(spoil, loss, validation, capsys):
    """A loss that was infinite, with finite gradients, updated the weights."""
    trainer = trainer_of(Batches(spoil), post_validation=validation)
    history, error = run(trainer)
    assert error is None
    assert_close(weights(trainer), plain(Batches(spoil), skip=[BAD]))
    assert [metrics["skipped"] for metrics in history] == [step == BAD for step in range(STEPS)]
    assert [metrics["step"] for metrics in history] == list(range(1, STEPS + 1))
    assert json.loads(json.dumps(finite(history[BAD]), allow_nan=False))["loss"] == loss
    assert (trainer.values.num_skipped, trainer.values.num_non_finite) == (1, 1)
    at_input = "the output of layer0.0, stage 0, microbatch 1 (NaN in its input)"
    where = at_input if spoil == "nan" else "the loss, stage 1, microbatch 1"
    text = f"NOT FINITE: step {BAD + 1}: the loss is {loss}; its update is skipped. {loss} first appeared in "
    assert text + where in capsys.readouterr().out


@pytest.mark.parametrize("validation", [False, True])
def test_continue_is_what_plain_torch_does(validation):
    for spoil in ("nan", "loss"):
        trainer = trainer_of(Batches(spoil), non_finite="continue", post_validation=validation)
        history, error = run(trainer)
        assert error is None
        assert not any(metrics["skipped"] for metrics in history)
        found = weights(trainer)
        assert_close(found, plain(Batches(spoil)))
        assert any(each.isnan().any() for each in found.values()) == (spoil == "nan")


def test_stop_ends_the_run_before_the_update_with_the_last_checkpoint_intact(tmp_path):
    trainer = trainer_of(Batches("nan"), non_finite="stop")
    trainer.callbacks = [Checkpoints(tmp_path, every=1, keep=2, background=True, config={})]
    history, error = run(trainer)
    assert error == (
        "step 3: the loss is NaN. NaN first appeared in the output of layer0.0, stage 0, microbatch 1 "
        "(NaN in its input). The run stops (non_finite=stop); resume=auto begins again after the newest "
        "checkpoint, if there is one, with the same data, and non_finite=skip leaves such a step out"
    )
    assert [metrics["step"] for metrics in history] == [1, 2, 3]  # the last one, too, is logged
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-2"]
    other = trainer_of(Batches())
    Checkpoints(tmp_path, every=1, keep=2, background=True, config={}).resume(other, tmp_path, STEPS)
    assert other.next_step == 2
    assert all(torch.equal(each, weights(trainer)[name]) for name, each in weights(other).items())


def test_a_parameter_that_is_nan_stops_the_run_and_is_never_saved(tmp_path, capsys, monkeypatch):
    """It was skipped to the end, with exit status 0; its weights replaced the good checkpoints."""
    monkeypatch.setattr(non_finite, "_MOST_SKIPPED", 3)
    trainer = trainer_of(Batches())
    trainer.callbacks = [Checkpoints(tmp_path, every=1, keep=2, background=False, config={})]
    steps = trainer.run(STEPS)
    next(steps), next(steps)
    with torch.no_grad():
        trainer.pipeline.stages[1].layer1[0].weight[0, 0] = math.nan
    with pytest.raises(
        NonFiniteError,
        match=r"step 5: .*output of layer1\.0, stage 1, microbatch 0 \(NaN in its parameters\).*3 ste",
    ):
        list(steps)
    assert "CHECKPOINT FAILED: parameter layer1.0.weight is NaN or infinite" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1"]  # step 2's was due after it
    trainer.leaving = "a signal"
    with pytest.raises(CheckpointError, match=r"parameter layer1\.0\.weight is NaN"):
        trainer.callbacks[0].finish(trainer)


def test_a_result_that_does_not_come_again_is_said_to(capsys):
    trainer = trainer_of(Batches())
    layer, done = trainer.pipeline.stages[0].layer0, []

    def once(module, args, output):
        if len(done) == 1:
            output = output + math.inf
        done.append(1)
        return output

    layer.register_forward_hook(once)
    history, error = run(trainer)
    assert error is None
    assert history[0]["skipped"]
    assert "every value was finite: a device or its memory may be faulty" in capsys.readouterr().out


def test_overflows_of_a_loss_scale_are_no_faults_and_its_loss_is():
    """The scale, chosen so that gradients overflow, is halved until they do not; no policy minds."""
    for action in ("skip", "stop", "continue"):
        scale = LossScale(start=2.0**1022)
        trainer = trainer_of(Batches(), loss_scale=scale, non_finite=action)
        history, error = run(trainer)
        assert error is None
        assert history[0]["skipped"]
        assert trainer.values.num_skipped >= 1
        assert trainer.values.num_non_finite == 0
    trainer = trainer_of(Batches("loss"), loss_scale=LossScale(start=8.0), non_finite="stop")
    assert "the loss is Infinity" in run(trainer)[1]


def on_two_ranks(rank):
    """A pipeline of two ranks, then two replicas, of which the second one has the bad data."""
    found = {}
    for spoil in ("nan", "loss"):
        for validation in (False, True):
            trainer = trainer_of(Batches(spoil), "zb_h1", num_ranks=2, post_validation=validation)
            history, error = run(trainer)
            found[spoil, not validation] = [each["skipped"] for each in history], error, weights(trainer)
            trainer.pipeline.close()
    trainer = trainer_of(Batches("nan"), "zb_h1", num_ranks=2, non_finite="stop")
    found["stop"] = run(trainer)[1]
    replicas = trainer_of(Batches("loss", 1, 2), mesh=make_mesh(replicate=2), non_finite="stop")
    found["replicas"] = run(replicas)[1]
    return found


def test_all_ranks_and_replicas_decide_alike():
    """Only the last stage's rank sees the loss; only the second replica has bad rows."""
    everyone = run_ranks(on_two_ranks, 2)
    for found in everyone:
        for spoil in ("nan", "loss"):
            for is_synchronous in (True, False):
                skipped, error, kept = found[spoil, is_synchronous]
                assert error is None
                assert skipped == [step == BAD for step in range(STEPS)]
                assert_close(kept, plain(Batches(spoil), skip=[BAD]))
        assert found["stop"].startswith(
            "step 3: the loss is NaN. NaN first appeared in the output of layer0.0, stage 0, microbatch 1"
        )
        assert found["replicas"].startswith(
            "step 3: the loss is Infinity. Infinity first appeared in the loss, stage 1, microbatch 1, data "
            "part 1."
        )
    assert everyone[0]["stop"] == everyone[1]["stop"]


class Rows(torch.utils.data.Dataset):
    """Rows by number, of which some hold NaN in their input."""

    def __init__(self, *bad):
        self.bad = bad

    def __len__(self):
        return 48

    def __getitem__(self, row):
        generator = torch.Generator().manual_seed(row)
        x, y = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
        if row in self.bad:
            x[3] = math.nan
        return x, y


def on_data(given, **options):
    trainer = trainer_of(Batches(), **options)
    data = loaded_data(given, batch_size=ROWS, seed=0)
    return Trainer(
        pipeline=trainer.pipeline,
        optimizer=trainer.optimizer,
        data=data,
        learning_rate=lambda step: 1.0,
        num_recorded=0,
        evaluate_every=2 if data.num_evaluation_batches else 0,
    )


def test_an_evaluation_that_is_nan_prints_a_line(capsys):
    """It passed in silence: `held-out nan`, with exit status 0."""
    history = list(on_data((Rows(), Rows(19))).run(2))
    assert math.isnan(history[-1]["evaluation_loss"])
    assert capsys.readouterr().out == (
        "NOT FINITE: after step 2, evaluation_loss is NaN. This does not end the run\n"
    )
