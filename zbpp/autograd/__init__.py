"""The split backward, usable without any pipeline: B now, W when there is time."""

from zbpp.autograd.rules import Capture, rule
from zbpp.autograd.split import backward_input
from zbpp.autograd.weight_grads import WeightGrads

__all__ = ["Capture", "WeightGrads", "backward_input", "rule"]
