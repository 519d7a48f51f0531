"""Refuses an optimizer that needs sparse gradients, such as SparseAdam, for weights with dense gradients.

Such an optimizer fails in its step, when other ranks, or other stages of this rank, have updated their
weights already. A module of torch says by its attribute `sparse` whether its weight's gradient is sparse. A
user's own module may call `torch.nn.functional.embedding(..., sparse=True)`: its parameters pass here, and
the optimizer's own error names them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zbpp.runtime.optimizer_trial import needs_sparse_gradients


def refusal_of_dense(optimizer: torch.optim.Optimizer, stages: Iterable[nn.Module]) -> str:
    """Why the optimizer can't update those parameters that get dense gradients; "" if it can."""
    optimized = {id(each) for group in optimizer.param_groups for each in group["params"]}
    dense = [name for stage in stages for name, each in _dense_parameters(stage) if id(each) in optimized]
    if not dense or not needs_sparse_gradients(optimizer):
        return ""
    more = f" and {len(dense) - 1} more parameters" if len(dense) > 1 else ""
    return (
        f"{type(optimizer).__name__} takes sparse gradients alone, and {dense[0]}{more} would get dense "
        "ones: give it only the weights of nn.Embedding(..., sparse=True), or take an optimizer such as "
        "torch.optim.AdamW"
    )


def _dense_parameters(stage: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """The trainable parameters of torch's own modules that make dense gradients, with their names."""
    for path, module in stage.named_modules():
        if type(module).__module__.startswith("torch.nn.") and not getattr(module, "sparse", False):
            for name, each in module.named_parameters(path, recurse=False):
                if each.requires_grad:
                    yield name, each
