"""A schedule-free optimizer in the trainer against a plain loop: its steps and its averages."""

import copy

import pytest
import torch
from torch.nn import functional as F

from helpers.trainers import BATCH_SIZE, small_trainer
from zbpp.data import regression_data
from zbpp.models.mlp import Mlp
from zbpp.training.optim.master_weights import MasterWeights

pytestmark = pytest.mark.usefixtures("float64")
STEPS, LR, BETA = 6, 0.1, 0.9


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Defazio et al., The Road Less Scheduled, arXiv:2405.15682, with the interface of its package.

    In train mode parameters are y, the points at which gradients are taken; in eval mode x, the averages.
    """

    def __init__(self, params, lr=LR):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def _interpolate(self, weight):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)

    def train(self):
        if not self.param_groups[0]["train_mode"]:
            self._interpolate(1 - BETA)
            self._set(True)

    def eval(self):
        if self.param_groups[0]["train_mode"]:
            self._interpolate(1 - 1 / BETA)
            self._set(False)

    def _set(self, mode):
        for group in self.param_groups:
            group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode: call optimizer.train()")
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.data.clone())
                x = p.data.lerp(z, 1 - 1 / BETA)
                z -= group["lr"] * p.grad
                x.lerp_(z, 1 / group["k"])
                p.data.copy_(x.lerp(z, 1 - BETA))


def made(parameters, **_):
    return ScheduleFreeSGD(parameters)


def trainer_of(**options):
    trainer = small_trainer(optimizer=made, evaluate_every=2, clip_norm=None, **options)
    trainer.learning_rate = lambda step: 1.0
    trainer.data = trainer.data._replace(num_evaluation_batches=2)
    trainer._batches._data = trainer.data
    return trainer


def plain_loop():
    """(training losses, held-out losses, averages at the end) of plain torch."""
    module = Mlp(in_features=6, hidden_size=10, out_features=3, num_layers=4).build_stage(0, 1)
    optimizer = ScheduleFreeSGD(module.parameters())
    data = regression_data(in_features=6, out_features=3, batch_size=BATCH_SIZE, seed=0)
    losses, held_out = [], []

    def mean(source, number):
        inputs, target = (each.double() for each in source.batch(number))
        return F.mse_loss(module(inputs), target)

    for step in range(STEPS):
        optimizer.train()
        optimizer.zero_grad()
        loss = mean(data.train, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if step % 2:
            optimizer.eval()
            with torch.no_grad():
                held_out.append(sum(mean(data.evaluation, number) for number in range(2)) / 2)
    optimizer.eval()
    return losses, list(map(float, held_out)), module.state_dict()


def test_steps_evaluations_and_saved_weights_are_those_of_a_plain_loop():
    losses, held_out, averages = plain_loop()
    trainer = trainer_of()
    metrics = list(trainer.run(STEPS))
    assert [each["loss"] for each in metrics] == pytest.approx(losses, rel=1e-12)
    found = [each["evaluation_loss"] for each in metrics if "evaluation_loss" in each]
    assert found == pytest.approx(held_out, rel=1e-12)
    between = copy.deepcopy(trainer.pipeline.state_dict())
    with trainer.averaged():
        for name, value in trainer.pipeline.state_dict().items():
            torch.testing.assert_close(value, averages[name], rtol=1e-11, atol=1e-14)
            assert not torch.equal(value, between[name])
    for name, value in trainer.pipeline.state_dict().items():
        torch.testing.assert_close(value, between[name], rtol=1e-12, atol=1e-14)


def test_with_master_weights_the_cast_weights_follow_the_averages():
    trainer = small_trainer()
    masters = MasterWeights(trainer.pipeline.parameters(), torch.bfloat16)
    trainer.masters, trainer.optimizer = masters, ScheduleFreeSGD(masters.parameters())
    for master in masters.parameters():
        trainer.optimizer.state[master]["z"] = torch.zeros_like(master)
    trainer.optimizer._set(True)
    with trainer.averaged():
        for each in trainer.pipeline.parameters():
            assert torch.equal(each, masters.of(each).bfloat16())
    assert trainer.optimizer.param_groups[0]["train_mode"]
