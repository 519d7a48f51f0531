"""Auxiliary losses and losses that are dicts among the trainer's metrics."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, auxiliary_loss, plan
from zbpp.data import regression_data
from zbpp.training.trainer import Trainer

M, STEPS = 2, 4


class Layer(nn.Module):
    """A linear layer whose mean square output is a further loss; value(x): that loss."""

    def __init__(self, number, name):
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.name = nn.Linear(6, 6, dtype=torch.float64), name

    def compute(self, x):
        y = self.linear(x)
        return y, 0.1 * y.square().mean()

    def forward(self, x):
        y, value = self.compute(x.double())
        if self.name is not None:
            auxiliary_loss(self.name, value)
        return y


def loss(output, target):
    return {"error": F.mse_loss(output, target.double()), "size": output.abs().mean()}


def data():
    return regression_data(in_features=6, out_features=6, batch_size=8, seed=0)


def trainer_of(rank, num_ranks, name="z", **options):
    timetable = plan("zb_v", num_ranks, M)
    stages = {index: Layer(index, name) for index in timetable.stages_of(rank)}
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    return Trainer(
        pipeline=Pipeline(stages, timetable, options.pop("loss_fn", loss)),
        optimizer=torch.optim.SGD(parameters, lr=0.1),
        data=data()._replace(num_evaluation_batches=2),
        learning_rate=lambda step: 1.0,
        num_recorded=0,
        **options,
    )


def train(rank, num_ranks):
    return [*trainer_of(rank, num_ranks, evaluate_every=2).run(STEPS)]


def plain_loop():
    """Per step {name: value} of a loop over whole batches in one process, two layers a rank."""
    layers = nn.ModuleList(Layer(number, "z") for number in range(4))
    optimizer, history = torch.optim.SGD(layers.parameters(), lr=0.1), []

    def losses(batch):
        x, target = (each.double() for each in batch)
        z = 0.0
        for layer in layers:
            x, value = layer.compute(x)
            z = z + value
        return {"z": z, **loss(x, target)}

    for step in range(STEPS):
        found = losses(data().train.batch(step))
        optimizer.zero_grad()
        sum(found.values()).backward()
        optimizer.step()
        found["loss"] = found["error"] + found["size"]
        if step % 2:
            held_out = [losses(data().evaluation.batch(number)) for number in range(2)]
            for name in ("error", "size"):
                found[f"evaluation_{name}"] = sum(each[name] for each in held_out) / 2
            found["evaluation_loss"] = found["evaluation_error"] + found["evaluation_size"]
        history.append({name: value.item() for name, value in found.items()})
    return history


def test_each_step_has_its_named_losses_on_every_rank_and_each_evaluation_those_of_the_loss():
    expected = plain_loop()
    usual = {"step", "grad_norm", "learning_rate", "rows_per_second", "step_seconds", "skipped"}
    for history in run_ranks(train, 2, 2):
        for metrics, named in zip(history, expected, strict=True):
            assert metrics.keys() == usual | named.keys()
            assert {name: metrics[name] for name in named} == pytest.approx(named, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["loss", "grad_norm", "rows_per_second", "evaluation_loss", "expected_makespan_ms"]
)
def test_a_loss_with_the_name_of_a_metric_is_refused_at_the_first_step(name):
    run = trainer_of(0, 1, name).run(STEPS)
    with pytest.raises(ValueError, match=f"a loss is called '{name}', as a metric of the trainer is: give"):
        next(run)


def test_a_loss_with_the_name_of_one_of_the_models_metrics_is_refused():
    trainer = trainer_of(0, 1, metrics=lambda output, target: {"size": 1.0, "accuracy": 0.5})
    with pytest.raises(
        ValueError, match=r"a loss is called 'size', as a metric of the model's metrics\(output"
    ):
        trainer.evaluate()
    trainer = trainer_of(0, 1, metrics=lambda output, target: {"loss": 1.0})
    with pytest.raises(ValueError, match="a metric is called 'loss'"):
        trainer.evaluate()
    trainer = trainer_of(0, 1, metrics=lambda output, target: {"accuracy": 0.5})
    names = {"evaluation_loss", "evaluation_accuracy", "evaluation_error", "evaluation_size"}
    assert trainer.evaluate().keys() == names
