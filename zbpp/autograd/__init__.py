"""The split backward, usable without any pipeline: B now, W when there is time.

How B and W are split, and what lives between them, is the docstring of split.py. To read the split, take
split.py, graph.py, rules.py and weight_grads.py, in this order.

    split.py           B: one backward pass that captures dy where a weight's gradient can wait
    graph.py           the walk: which gradients can wait (sites, chains)
    rules.py           one rule per kind of node: what W needs of it, how W computes the gradient
    adding.py          how W adds products and rows to a gradient, which may be wider than they are
    capture.py         what a rule keeps of a node until W: saved tensors, packed ones too
    weight_grads.py    W: the tasks that B leaves, and running them
    arguments.py       the arguments of backward_input, checked
    node_roles.py      what each type of node means for the walk
    views.py           chains that only make views of a weight
    chains.py          chains that compute: a cast of a weight, say, which W runs by autograd
    leaf_grad.py       where a leaf's gradients are summed: `.grad` or `main_grad`
    storages.py        the storages of a tensor, of sparse tensors and DTensors too
    hooks.py           users' hooks: which leaves have some, and taking them off for a while
    hooked_leaves.py   leaves with hooks: the engine takes what W has summed to the leaf's own node
    gradient_guard.py  notices Python code that changes a captured gradient during B
    reentrant.py       graphs with a reentrant checkpoint: one plain backward instead of the split
    references.py      the modules and tensors that a Python callable refers to
    collector.py       `defer`: how the backward of an autograd Function puts off a gradient
    explain.py         `explain`: what B would do with each weight

These files import none of the folders, which are extras:

    models/            recompute, auxiliary losses, weights on a device mesh, the loss of a language model
    offload/           saved tensors that leave device memory between F and B
    compiled/          F, B and W of a module compiled by Inductor

An extra reaches the split by what the split offers to everybody: `rule` for a kind of node, `defer` for an
autograd Function, `PackedTensor` (capture.py) for saved-tensor hooks, `register_subclass` (rules.py) for
weights of a subclass of Tensor.
"""

from zbpp.autograd.capture import Capture, keep, saved
from zbpp.autograd.collector import defer
from zbpp.autograd.explain import Explanation, explain
from zbpp.autograd.models.auxiliary import auxiliary_loss, auxiliary_losses
from zbpp.autograd.models.linear_cross_entropy import linear_cross_entropy
from zbpp.autograd.models.recompute import checkpoint, recompute
from zbpp.autograd.models.sharded import capture_shards
from zbpp.autograd.rules import register_subclass, rule
from zbpp.autograd.split import backward_input
from zbpp.autograd.weight_grads import WeightGrads

register_subclass(capture_shards)  # the split itself knows no DTensor

__all__ = [
    "Capture",
    "Explanation",
    "WeightGrads",
    "auxiliary_loss",
    "auxiliary_losses",
    "backward_input",
    "checkpoint",
    "defer",
    "explain",
    "keep",
    "linear_cross_entropy",
    "recompute",
    "rule",
    "saved",
]
