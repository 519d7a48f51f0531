"""Custom autograd Functions in the split backward, `defer`, and rules for new nodes."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from helpers.cases import functions as cases
from helpers.cases.checkpoint import torchs
from helpers.cases.functions import Deferring, Layer, OfTripled
from helpers.cases.saved_hooks import under
from helpers.split import assert_equals_plain, call_module, double, float64, leaf
from zbpp.autograd import backward_input, keep, node_roles, rule, rules, saved
from zbpp.autograd.offload.host_copier import Copier
from zbpp.autograd.offload.saved_activations import SavedActivations


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """What has run so far."""
    found = []
    monkeypatch.setattr(cases, "record", found.append)
    return found


def test_a_functions_backward_runs_once(runs):
    facts = cases.function_between_layers().compare()
    assert "1.weight" in facts.computed
    assert len(facts.deferred) == 4
    assert runs == 4 * ["backward"]  # two microbatches, plain and split


def test_defer_hands_work_to_w(runs):
    facts = cases.deferring_function_above_layer().compare()
    assert "1.weight" in facts.deferred
    # In a plain backward at once, under the split in W.
    assert runs == ["backward", "compute", "backward", "compute"]


def saving_activations():
    return SavedActivations(Copier(torch.device("cpu")), least_bytes=1).saving()


HOOKS = {
    "save_on_cpu": under(save_on_cpu),
    "torch's checkpoint": torchs,
    "offload": under(saving_activations),
    "others": under(lambda: saved_tensors_hooks(torch.clone, lambda packed: packed)),
}
"""What `ctx.saved_tensors` unpacks within them is another tensor than the weight."""


@pytest.mark.parametrize("case", [cases.weight_of_function_used_twice, cases.weight_of_function_and_layer])
@pytest.mark.parametrize("hooks", HOOKS)
def test_defer_finds_a_weight_that_saved_tensor_hooks_have_packed(hooks, case):
    facts = case()._replace(call=HOOKS[hooks]).compare()
    assert facts.deferred == {"weight"}


@pytest.mark.parametrize("hooks", [None, *HOOKS])
def test_defer_computes_at_once_for_a_weight_whose_hooks_must_see_the_whole_gradient(hooks):
    def make():
        layer = Layer(Deferring)
        layer.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return layer

    assert_equals_plain(make, lambda: leaf(5, 4), HOOKS.get(hooks, call_module))


def test_a_function_of_the_weight_alone_is_a_chain_that_b_never_runs(runs):
    assert cases.function_of_the_weight_alone().compare().deferred == {"weight"}
    runs.clear()
    with float64():
        module = OfTripled()
        _, weight_grads = backward_input(module(double(5, 4)), double(5, 4), ())
    assert runs == []
    weight_grads.accumulate()
    assert runs == ["chain"]


# ---------------------------------------------------------------- a rule for a new node


@pytest.fixture
def _restored_rules():
    """Forget the rules that a test registers, also in the walk's cache of roles."""
    before = dict(rules._RULES)
    node_roles.role_of_type.clear()
    yield
    rules._RULES.clear()
    rules._RULES.update(before)
    node_roles.role_of_type.clear()


class Scale(nn.Module):
    """y = x * w, which autograd computes by a MulBackward0: no rule of zbpp's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


def add_row_sum(target, held, dy, fresh):
    gradient = (dy * held[0]).sum_to_size(target.shape)
    target.copy_(gradient) if fresh else target.add_(gradient)


@pytest.mark.usefixtures("_restored_rules")
def test_a_new_node_is_one_rule():
    assert assert_equals_plain(Scale, lambda: leaf(5, 4)).computed == {"weight"}

    @rule("MulBackward0", weights=(1,))
    def mul(node, operand):
        return keep(saved(node, "self"), add_row_sum)

    node_roles.role_of_type.clear()
    assert assert_equals_plain(Scale, lambda: leaf(5, 4)).deferred == {"weight"}
