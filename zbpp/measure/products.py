"""The matrix products of one stage's F, B and W, from which the ratios of their times follow.

A product costs its floating-point operations; torch counts them (torch.utils.flop_counter). All other
operations are left out. A product of F with a weight is two in backward: one for its input in B, and one for
its weight in W, unless the weight is frozen. Attention's products have no weight, so their whole backward,
twice F, is B's. Causal attention counts as if it looked at all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zbpp.measure.microbatch_memory import past_of, received, slice_keywords, trial_feed
from zbpp.runtime.stage import Loss, StageWorker

_WITHOUT_WEIGHTS = ("bmm", "baddbmm", "_scaled_dot_product", "_flash_attention", "_efficient_attention")

# torch 2.13 counts attention's kernels on GPUs only.
_ON_CPUS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q, k, v
    )
}


class Products(NamedTuple):
    """The floating-point operations of F, B and W of one microbatch on one stage.

    attention: those of F's products without weights, which grow with the square of a sequence's length.
    """

    f: float
    b: float
    w: float
    attention: float = 0.0


def products(
    index: int,
    module: nn.Module,
    inputs: Sequence[tuple[Any, ...]],
    *,
    is_last: bool = False,
    loss_fn: Loss | None = None,
    target: Sequence[Any] = (None,),
    slice_bounds: Sequence[int] = (),
) -> tuple[Products, list[tuple[Any, ...]]]:
    """Run F of one microbatch and count; returns F's outputs, too. On real tensors, or in FakeTensorMode.

    inputs, target, and the outputs: of each slice; one entry without slices.
    """
    worker, num = StageWorker(index, module, is_last=is_last, loss_fn=loss_fn), len(inputs)
    keywords = slice_keywords(past_of(index, module, slice_bounds), num)
    worker.begin(trial_feed([*inputs] if index == 0 else (), keywords, [*target], range(num), loss_fn))
    messages = [tuple(map(received, each)) if index else () for each in inputs]
    with FlopCounterMode(display=False, custom_mapping=_ON_CPUS) as counter:
        outputs = [worker.forward(unit, message) for unit, message in enumerate(messages)]
    worker.abandon()
    found = _of_forward(counter.get_flop_counts().get("Global", {}), _trained_share(module))
    return found, outputs


def _of_forward(counts: Mapping[Any, int], trained: float) -> Products:
    """counts: {operation: the floating-point operations of all its calls in F}. trained: of the weights."""
    f = float(sum(counts.values()))
    with_weight = float(sum(count for operation, count in counts.items() if _has_weight(operation)))
    return Products(f, 2 * f - with_weight, trained * with_weight, f - with_weight)


def _trained_share(module: nn.Module) -> float:
    """The share of the trained numbers in the weights of a stage's products; an embedding has no product."""
    owners = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
    weights = {
        each: _numel(owner, each)
        for owner in owners
        for each in owner.parameters(recurse=False)
        if each.dim() > 1
    }
    total = sum(weights.values())
    return sum(numel for each, numel in weights.items() if each.requires_grad) / total if total else 1.0


def _numel(owner: nn.Module, weight: nn.Parameter) -> int:
    """The numbers of a weight; a quantized linear layer packs them."""
    if isinstance(owner, nn.Linear) and weight is owner.weight:
        return owner.in_features * owner.out_features
    return weight.numel()


def _has_weight(operation: torch._ops.OpOverloadPacket) -> bool:
    name = str(operation).rpartition(".")[2]
    return not name.startswith(_WITHOUT_WEIGHTS)
