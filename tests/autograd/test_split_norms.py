"""The split backward of norms, whose small gradients B computes, and of weights that are computed."""

import pytest

from helpers.cases import norms as cases
from helpers.cases.norms import COMPUTED_WEIGHTS, NORMS
from zbpp.autograd import node_roles


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_computed_in_b(name):
    """Its buffers are compared too, and stay as F left them."""
    facts = cases.norm(name).compare()
    assert facts.deferred == set()


@pytest.mark.parametrize("name", NORMS)
def test_layers_around_a_norm_are_deferred(name):
    facts = cases.layers_around_norm(name).compare()
    assert facts.deferred == {"before.weight", "before.bias", "after.weight", "after.bias"}


def test_running_statistics_move_once_per_forward():
    """Equal to plain autograd's, and counted: B and W run no forward."""
    counted = []
    cases.running_statistics(counted=counted).compare()
    assert counted == [1, 2, 1, 2]


# ---------------------------------------------------------------- weights that are computed from others


@pytest.mark.parametrize("name", COMPUTED_WEIGHTS)
def test_a_weight_with_a_tree_behind_it_is_computed_in_b(name):
    facts = cases.weight_with_tree(name).compare()
    assert facts.deferred <= {"bias"}
    assert facts.computed >= {name for name in facts.grads if name != "bias"}


def test_a_weight_with_a_chain_behind_it_is_deferred():
    facts = cases.weight_with_chain().compare()
    assert "parametrizations.weight.original" in facts.deferred


def test_a_chain_runs_once_per_microbatch_however_often_the_weight_is_used():
    """Two sites share the chain's head: their gradients are summed there first."""
    runs = []
    facts = cases.chain_used_twice(runs=runs).compare()
    assert facts.deferred == ({"weight"} if node_roles.FUNCTION_NODES_LIVE else set())
    assert len(runs) == 2 + 2  # two microbatches of plain autograd, two of ours
