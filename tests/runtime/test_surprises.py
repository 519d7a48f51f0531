"""What a user changes between or in steps gives plain autograd's gradients, or is refused; never ignored."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline, plan

M, SIZE = 4, 5
pytestmark = pytest.mark.usefixtures("float64")


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


# ---------------------------------------------------------------- changes inside a step


class Net(nn.Module):
    """Two layers, with a buffer between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("scale", torch.full((SIZE,), 2.0))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale)


def doubled(state_dict):
    return {name: each * 2 for name, each in state_dict.items()}


def in_thread(function):
    thread = threading.Thread(target=torch.no_grad()(function))
    thread.start()
    thread.join()


def halves():
    return torch.full((SIZE, SIZE), 0.5)


ROUTES = {
    "written through data": lambda net: net.last.weight.data.mul_(2),
    "data replaced": lambda net: setattr(net.last.weight, "data", halves()),
    "in place": lambda net: net.last.weight.mul_(2),
    "through detach": lambda net: net.last.weight.detach().mul_(2),
    "in another thread": lambda net: in_thread(lambda: net.last.weight.copy_(halves())),
    "set_": lambda net: net.last.weight.set_(halves()),
    "set_ of data": lambda net: net.last.weight.data.set_(halves()),
    "load_state_dict": lambda net: net.load_state_dict(doubled(net.state_dict())),
    "load_state_dict, assigned": lambda net: net.load_state_dict(doubled(net.state_dict()), assign=True),
    "storage grown": lambda net: net.last.weight.untyped_storage().resize_(2000),
    "storage gone": lambda net: net.last.weight.untyped_storage().resize_(0),
    "replaced": lambda net: setattr(net.last, "weight", nn.Parameter(halves())),
    "frozen": lambda net: net.last.weight.requires_grad_(False),
    "module removed": lambda net: setattr(net, "last", nn.Identity()),
    "buffer written": lambda net: net.scale.mul_(2),
    "buffer resized": lambda net: net.scale.resize_(SIZE + 3),
    "buffer replaced": lambda net: setattr(net, "scale", torch.full((SIZE,), 7.0)),
}


def in_f(net, change, loss):
    net.first.register_forward_pre_hook(lambda *_: change())
    return loss


def between_f_and_b(net, change, loss):
    return lambda *given: (change(), loss(*given))[1]


def between_b_and_w(net, change, loss):
    """In the backward of the layer below the weight."""
    net.first.register_forward_hook(lambda *given: given[2].register_hook(lambda _: change()) and None)
    return loss


def outcome(route, moment, is_pipelined):
    """The gradients of a step in which a weight or buffer changes; or the error, without shapes' places."""
    torch.manual_seed(0)
    nets, made = {s: Net() for s in range(2)}, []

    def change():
        if not made:
            made.append(route)
            with torch.no_grad():
                ROUTES[route](nets[0])

    loss = moment(nets[0], change, F.mse_loss)
    names = {(s, name): each for s, net in nets.items() for name, each in net.named_parameters()}
    x, y = batch()
    try:
        if is_pipelined:
            Pipeline(nets, plan("zb_v", 1, 1), loss).step(x, target=y)
        else:
            loss(nets[1](nets[0](x)), y).backward()
    except RuntimeError as error:
        return str(error)[:60]
    finally:
        assert made
    return {name: each.grad for name, each in names.items()}


@pytest.mark.parametrize("moment", [in_f, between_f_and_b, between_b_and_w])
@pytest.mark.parametrize("route", ROUTES)
def test_a_change_inside_a_step_has_the_outcome_of_plain_autograd(route, moment):
    """The same gradients, also where they are of no use to anybody, or the same error."""
    mine, plain = (outcome(route, moment, is_pipelined) for is_pipelined in (True, False))
    if isinstance(plain, str):
        assert mine == plain
    else:
        assert mine.keys() == plain.keys()
        for name, expected in plain.items():
            torch.testing.assert_close(mine[name], expected, rtol=1e-10, atol=1e-13)
