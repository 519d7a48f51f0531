"""The split backward, usable without any pipeline: B now, W when there is time."""

from zbpp.autograd.collector import defer
from zbpp.autograd.explain import Explanation, explain
from zbpp.autograd.recompute import checkpoint, recompute
from zbpp.autograd.rules import Capture, keep, rule, saved
from zbpp.autograd.split import backward_input
from zbpp.autograd.weight_grads import WeightGrads

__all__ = [
    "Capture",
    "Explanation",
    "WeightGrads",
    "backward_input",
    "checkpoint",
    "defer",
    "explain",
    "keep",
    "recompute",
    "rule",
    "saved",
]
