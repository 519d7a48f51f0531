"""Whether an optimizer's step can be taken back: a step of a twin shows what the optimizer keeps."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.mesh import local_of
from zbpp.training.snapshot import copied, options_of, snapshot

_CHECKED_ONCE = ("_need_device_dtype_check_for_fused",)
"""Attributes by which torch's optimizers remember that the first step has checked the weights."""


def refusal_of(optimizer: torch.optim.Optimizer) -> str:
    """Why a step of this optimizer can't be taken back; "" if it can.

    A twin of the optimizer makes a step on one small parameter per group, with gradients of zero. The step
    shows which states and attributes the optimizer keeps.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{name}.step needs a closure, and a pipeline has none: use another optimizer"
    try:
        snapshot(optimizer.state, [])
        for group in optimizer.param_groups:
            snapshot(options_of(group), [])
    except ValueError as error:
        return f"{name}: {error}"
    twin = _twin(optimizer)
    before = dict(vars(twin))
    try:
        twin.step()
    except Exception as error:
        if _is_torchs(twin):
            return (
                f"{name} can't make a step with these options and weights ({type(error).__name__}: {error}): "
                "make it with other options, such as torch's defaults"
            )
        return ""  # the optimizer needs more than this; `after_step` looks at the state after each real step
    try:
        snapshot(twin.state, [])
    except ValueError as error:
        return f"{name}: {error}"
    changed = [
        key for key, value in vars(twin).items() if value is not before.get(key) and key not in _CHECKED_ONCE
    ]
    if changed:
        return (
            f"{name} changes its attributes {', '.join(changed)} in step, which post-validation can't take "
            "back: write optimizer.validation=before, or keep them in optimizer.state"
        )
    return ""


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's own and takes gradients of zeros, which SparseAdam does not."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    return type(optimizer).__module__.startswith("torch.optim.") and not is_sparse


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the same options over one small parameter per group, without hooks and states."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # the wrapper of a learning-rate scheduler, bound to the optimizer itself
    vars(twin).pop("_optimizer_step_pre_hooks", None)
    vars(twin).pop("_optimizer_step_post_hooks", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**copied(group), "params": _small(group["params"])} for group in optimizer.param_groups
    ]
    return twin


def _small(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """For each dtype and device a parameter like the smallest trainable one, with a gradient of zeros."""
    likes: dict[Any, Tensor] = {}
    for each in sorted(parameters, key=lambda each: -each.numel()):
        if each.requires_grad:  # a frozen one may be of integers; an optimizer leaves it alone
            likes[each.dtype, each.device] = local_of(each.detach())
    made = [nn.Parameter(torch.zeros_like(like)) for like in likes.values()]
    for each in made:
        each.grad = torch.zeros_like(each)
    return made
