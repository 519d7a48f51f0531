"""The contract between zbpp and a user's model: two methods, no base class.

A model never sees a rank, a group, a microbatch or a schedule. It is asked for one
stage at a time, so no process ever holds the whole of it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class PipelineModel(Protocol):
    """What the trainer needs of a model; named in YAML by `_target_`."""

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """Stage `index` of `num_stages`, in forward order, on the CPU.

        Stage 0 gets the batch's inputs, each later stage what the one before returned
        (a tensor, or a tuple of tensors passed as positional arguments). Parameter names
        and initial weights must not depend on `num_stages`. Raises ValueError if the model
        can't be cut into that many stages.
        """
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The scalar mean loss of one microbatch; `output` is the last stage's."""
        ...
