"""Trainer on one rank against a plain loop with torch's own optimizer, clipping and schedule."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.trainers import BATCH_SIZE, NUM_MICROBATCHES, small_trainer
from zbpp.data import regression_data
from zbpp.job.world import World
from zbpp.models.mlp import Mlp
from zbpp.planning import compare
from zbpp.training.measured_steps import Title, summarise
from zbpp.training.optim.optimizer import OPTIMIZERS, warmup_cosine
from zbpp.training.optim.precision import LossScale

pytestmark = pytest.mark.usefixtures("float64")
STEPS = 20
CLIP_NORM = 2.0
FACTOR = partial(warmup_cosine, num_steps=STEPS, warmup_steps=5, min_ratio=0.1)


def mlp():
    return Mlp(in_features=6, hidden_size=10, out_features=3, num_layers=4)


def data():
    return regression_data(in_features=6, out_features=3, batch_size=BATCH_SIZE, seed=0)


def plain_loop(clip_norm):
    """(losses, norms) of a single-process PyTorch loop over whole batches."""
    module = mlp().build_stage(0, 1)
    matrices = [p for p in module.parameters() if p.dim() == 2]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, FACTOR)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, target = (each.double() for each in data().train.batch(step))
        optimizer.zero_grad()
        loss = F.mse_loss(module(inputs), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


@pytest.mark.parametrize("clip_norm", [CLIP_NORM, 1e9])
def test_a_run_follows_a_plain_loop_with_adamw_clipping_and_schedule(clip_norm):
    history = list(small_trainer(clip_norm=clip_norm).run(STEPS))
    losses, norms = plain_loop(clip_norm)
    assert min(norms) < CLIP_NORM < max(norms)  # some steps are clipped, some are not
    assert [metrics["loss"] for metrics in history] == pytest.approx(losses, rel=1e-12, abs=0)
    assert [metrics["grad_norm"] for metrics in history] == pytest.approx(norms, rel=1e-11, abs=0)


def test_the_predicted_peak_of_a_run_has_the_unit_of_zbpp_plan():
    """With two stages per rank timeline.png showed twice what `zbpp plan` says."""
    trainer = small_trainer()
    history = list(trainer.run(3))
    here = World(0, 1, torch.device("cpu"))
    predicted = summarise(
        Title("zb_v"), trainer, history, here, torch.float64, seconds=1.0
    ).measured.predicted
    assert predicted.timetable.num_stages == 2
    assert predicted.peak_memory == compare(["zb_v"], 1, NUM_MICROBATCHES)["zb_v"].peak_memory


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_that_releases_gradients_has_the_metrics_of_one_that_does_not(name):
    """Losses, norms and learning rates are equal to the last bit."""
    found = {}
    for release in (False, True):
        trainer = small_trainer(optimizer=OPTIMIZERS[name], gradient_release=release)
        found[release] = [
            (each["loss"], each["grad_norm"], each["learning_rate"], each["skipped"])
            for each in trainer.run(STEPS)
        ]
    assert found[True] == found[False]
    assert len(set(found[True])) == STEPS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": 1.0}, "clip_norm=1 needs the norm of all gradients before the first update"),
        ({"loss_scale": LossScale()}, "doesn't go with master weights or a loss scale"),
    ],
)
def test_a_trainer_that_releases_gradients_refuses_what_needs_all_of_them(options, words):
    with pytest.raises(ValueError, match=words):
        small_trainer(gradient_release=True, **options)
