"""Everything that a checkpoint holds comes back as it was, in one process."""

from collections import Counter, OrderedDict

import optimi
import pytest
import torch
from torch import nn

import zbpp
from zbpp import GradientRelease
from zbpp.checkpoints.nest import decoded, encoded
from zbpp.training.optim.optimizer import MuonAndAdamW


class Stage(nn.Sequential):
    """A frozen layer, a layer without use, channels_last weights, a buffer, and a state that is no tensor."""

    def __init__(self):
        super().__init__(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4))
        self[0].to(memory_format=torch.channels_last)
        self[3].bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.unused.weight.register_hook(lambda grad: grad)
        self.calls = {"forward": 0, "names": ("a", 1.5)}

    def forward(self, x):
        self.calls["forward"] += 1
        for module in (self[0], self[1], self[2], self[3]):
            x = module(x)
        return x

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
    "optimi": lambda parameters: optimi.AdamW(parameters, lr=0.01, gradient_release=True),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": [each], "lr": 0.01 * number} for number, each in enumerate(parameters, 1)]
    ),
    "muon": lambda parameters: MuonAndAdamW(
        [
            {"params": [p for p in parameters if p.dim() == 2], "algorithm": "muon", "lr": 0.01},
            {"params": [p for p in parameters if p.dim() != 2], "algorithm": "adamw", "lr": 0.02},
        ],
        lr=0.01,
    ),
}


def run_of(name):
    torch.manual_seed(0)
    pipeline = zbpp.Pipeline({0: Stage()}, zbpp.plan("1f1b", 1, 2), nn.functional.cross_entropy)
    optimizer = OPTIMIZERS[name]([each for each in pipeline.parameters() if each.requires_grad])
    if name == "optimi":
        pipeline.use(GradientRelease(optimizer))
    return pipeline, optimizer


def train(pipeline, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(8, 2, 6, 6, generator=generator), torch.arange(8) % 4
        losses += pipeline.step(x, target=target)
        if pipeline.released is None:
            optimizer.step()
            optimizer.zero_grad()
    return [each.item() for each in losses]


def plain(value):
    """The nest with lists in place of tensors, without torch-optimi's references to groups."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key != "group"}
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_and_options_of_an_optimizer_come_back(tmp_path, name):
    pipeline, optimizer = run_of(name)
    train(pipeline, optimizer, range(3))
    zbpp.save(tmp_path, pipeline, optimizer, step=3)
    again, fresh = run_of(name)
    assert zbpp.load(tmp_path, again, fresh) == 3
    assert plain(again.state_dict()) == plain(pipeline.state_dict())
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())
    assert train(again, fresh, range(3, 6)) == train(pipeline, optimizer, range(3, 6))
    assert again.stages[0].calls == {"forward": 12, "names": ("a", 1.5)}


class Growing(nn.Linear):
    """Its extra state is a tensor, or nothing yet, as in Transformer Engine."""

    def __init__(self, state):
        super().__init__(3, 3)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("saved", [torch.arange(5.0), torch.empty(0), None, {"a": torch.ones(2)}], ids=str)
@pytest.mark.parametrize("fresh", [torch.ones(2), None], ids=str)
def test_an_extra_state_may_have_another_size_and_kind_than_the_fresh_module_has(tmp_path, saved, fresh):
    """As in torch's load_state_dict; it was refused as the checkpoint of another model."""
    pipeline, again = (
        zbpp.Pipeline({0: nn.Sequential(Growing(state))}, zbpp.plan("gpipe", 1, 2), nn.functional.mse_loss)
        for state in (saved, fresh)
    )
    zbpp.save(tmp_path, pipeline, step=1)
    zbpp.load(tmp_path, again)
    assert plain(again.state_dict()) == plain(pipeline.state_dict())


def test_what_is_no_tensor_travels_as_json():
    value = {
        1: [None, True, float("inf"), "text"],
        "nest": OrderedDict(a=(1, (2.5,)), b=torch.ones(2)),
        "milestones": Counter({3: 2}),
    }
    tensors = {}
    text = encoded(value, "state", tensors)
    back = decoded(text, tensors.__getitem__)
    assert list(tensors) == ["state.nest.b"]
    assert repr(back) == repr(value)
    with pytest.raises(ValueError, match=r"state.f is a function, and a checkpoint holds tensors, numbers"):
        encoded({"f": lambda: 0}, "state", {})
