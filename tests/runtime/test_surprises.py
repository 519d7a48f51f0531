"""What a user changes between steps gives plain autograd's gradients, or is refused; it is never ignored."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline, plan
from zbpp.data import regression_data
from zbpp.training.trainer import Trainer

M, SIZE = 4, 5


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def stages():
    torch.manual_seed(0)
    return {s: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)) for s in range(2)}


def batch():
    torch.manual_seed(9)
    return torch.randn(M, SIZE), torch.randn(M, SIZE)


def pipeline_step(modules, pipeline):
    x, y = batch()
    pipeline.step(x, target=y)


def plain_step(modules, _):
    x, y = batch()
    F.mse_loss(modules[1](modules[0](x)), y).backward()


def replaced(modules):
    modules[0][0].weight = nn.Parameter(torch.full((SIZE, SIZE), 0.3))


def written_through_data(modules):
    modules[0][0].weight.data = torch.full((SIZE, SIZE), 0.3)


def module_added(modules):
    modules[0].add_module("new", nn.Linear(SIZE, SIZE))
    with torch.no_grad():
        modules[0].new.weight.fill_(0.1)
        modules[0].new.bias.zero_()


def module_removed(modules):
    del modules[0][2]


def frozen(modules):
    modules[0][0].weight.requires_grad_(False)


def gradient_set(modules):
    modules[0][0].weight.grad = torch.ones(SIZE, SIZE)


CHANGES = [replaced, written_through_data, module_added, module_removed, frozen, gradient_set]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_counts_as_in_plain_autograd(change):
    mine = stages()
    plain = copy.deepcopy(mine)
    pipeline = Pipeline(mine, plan("zb_v", 1, M), F.mse_loss)
    for modules, step in ((mine, pipeline_step), (plain, plain_step)):
        step(modules, pipeline)
        for module in modules.values():
            module.zero_grad()
        change(modules)
        step(modules, pipeline)
    for stage, module in mine.items():
        expected = dict(plain[stage].named_parameters())
        assert expected.keys() == dict(module.named_parameters()).keys()
        for name, parameter in module.named_parameters():
            if expected[name].grad is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-13)


def test_a_stage_can_not_be_exchanged_in_the_mapping():
    """The old module went on training."""
    pipeline = Pipeline(stages(), plan("zb_v", 1, M), F.mse_loss)
    with pytest.raises(TypeError, match="does not support item assignment"):
        pipeline.stages[0] = nn.Linear(SIZE, SIZE)


def trainer():
    modules = stages()
    modules[0][2].bias.requires_grad_(False)
    pipeline = Pipeline(modules, plan("zb_v", 1, M), F.mse_loss)
    trained = [each for each in pipeline.parameters() if each.requires_grad]
    return modules, Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data=regression_data(in_features=SIZE, out_features=SIZE, batch_size=M, seed=0),
        learning_rate=lambda step: 1.0,
    )


def unfrozen(modules):
    modules[0][2].bias.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "name"), [(replaced, "0.weight"), (module_added, "new.weight"), (unfrozen, "2.bias")]
)
def test_a_parameter_that_the_optimizer_does_not_have_is_refused(change, name):
    """It got gradients, counted in the norm, and was never updated."""
    modules, made = trainer()
    list(made.run(1))
    change(modules)
    with pytest.raises(RuntimeError, match=rf"{name} was replaced, added or made trainable"):
        list(made.run(2))


def test_a_new_parameter_that_the_optimizer_was_given_is_trained():
    modules, made = trainer()
    list(made.run(1))
    replaced(modules)
    weight = modules[0][0].weight
    made.optimizer.param_groups[0]["params"].append(weight)
    before = weight.detach().clone()
    list(made.run(2))
    assert not torch.equal(weight, before)
