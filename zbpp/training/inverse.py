"""Takes back a step of torch's AdamW or SGD by computing it backwards: without copies, but not exactly.

The gradient g of the step is kept until the next step's gate. With it, step t of AdamW is undone by
(arXiv:2401.10241, section 4):

    theta <- (theta + lr * m_hat / (sqrt(v_hat) + eps)) / (1 - lr * weight_decay)
    m     <- (m - (1 - b1) * g) / b1
    v     <- (v - (1 - b2) * g^2) / b2
    t     <- t - 1

The results are rounded: docs/optimizer.md says by how much they differ from the values before the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.mesh import local_of
from zbpp.training.snapshot import Options
from zbpp.training.trial_step import refusal_of

Group = dict[str, Any]
States = Mapping[Tensor, dict[str, Any]]


class InverseRollback:
    """The Rollback that computes backwards, for torch's AdamW and SGD.

    Raises ValueError for another optimizer, and for options that can't be computed backwards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            refusal = _refusal(type(optimizer), group)
            if refusal:
                raise ValueError(f"rollback=inverse {refusal}: write rollback=exact")
        if refusal := refusal_of(optimizer):
            raise ValueError(refusal)
        self._undo: Callable[[Group, list[nn.Parameter], States], None] = (
            undo_adamw if type(optimizer) is torch.optim.AdamW else undo_sgd
        )
        self._optimizer, self._options = optimizer, Options(optimizer)
        self._fresh: list[nn.Parameter] = []  # the parameters that had no state before the step
        self._has_stepped = False

    def keep(self, scaled: list[Tensor], *, steps: bool = True) -> None:
        """Remember the options, and which parameters have no state yet."""
        if scaled:
            raise ValueError(
                "rollback=inverse needs the gradients unchanged, and the loss scale is divided out of them: "
                "write rollback=exact"
            )
        state = self._optimizer.state
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        self._fresh = [each for each in parameters if not state.get(each)]
        self._options.keep([])

    def after_step(self, *, has_stepped: bool) -> None:
        """Remember whether there was a step."""
        self._has_stepped = has_stepped
        self._options.after_step()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """See Rollback."""
        with self._options.before_step():
            if self._has_stepped:
                with torch.no_grad():
                    self._undo_all()
            yield

    def tensors(self) -> list[Tensor]:
        """There are no copies."""
        return []

    def forget(self) -> None:
        """There are no copies to free."""

    def _undo_all(self) -> None:
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            moved = [each for each in group["params"] if each.grad is not None]
            if moved:
                self._undo(group, moved, state)
        for parameter in self._fresh:
            state.pop(parameter, None)


def undo_adamw(group: Group, parameters: list[nn.Parameter], state: States) -> None:
    """Undo a step of AdamW for parameters of one group, in place."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    by_step: dict[float, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        by_step[float(state[parameter]["step"])].append(parameter)
    for step, some in by_step.items():
        weights, gradients = (
            _local_parts(some),
            _local_parts([each.grad for each in some if each.grad is not None]),
        )
        first = _local_parts(state[each]["exp_avg"] for each in some)
        second = _local_parts(state[each]["exp_avg_sq"] for each in some)
        divisors = torch._foreach_sqrt(second)
        torch._foreach_div_(divisors, math.sqrt(1 - beta2**step))
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_addcdiv_(weights, first, divisors, value=rate / (1 - beta1**step))
        torch._foreach_div_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_add_(first, gradients, alpha=beta1 - 1)
        torch._foreach_div_(first, beta1)
        torch._foreach_addcmul_(second, gradients, gradients, value=beta2 - 1)
        torch._foreach_div_(second, beta2)
        torch._foreach_clamp_min_(second, 0.0)  # the root of a rounding error below zero would be NaN
        for parameter in some:
            state[parameter]["step"] -= 1


def undo_sgd(group: Group, parameters: list[nn.Parameter], state: States) -> None:
    """Undo a step of SGD for parameters of one group, in place. With d = g + weight_decay * theta, a step is

        buffer <- momentum * buffer + (1 - dampening) * d    (in the first step: buffer <- d)
        theta  <- theta - lr * u

    where u is d without momentum, buffer with momentum, and d + momentum * buffer with Nesterov momentum.
    """
    rate, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
    weights, gradients = (
        _local_parts(parameters),
        _local_parts([each.grad for each in parameters if each.grad is not None]),
    )
    if not momentum:
        torch._foreach_add_(weights, gradients, alpha=rate)
        torch._foreach_div_(weights, 1 - rate * decay)
        return
    buffers = _local_parts(state[each]["momentum_buffer"] for each in parameters)
    if group["nesterov"]:
        torch._foreach_add_(weights, gradients, alpha=rate)
        torch._foreach_add_(weights, buffers, alpha=rate * momentum)
        torch._foreach_div_(weights, 1 - rate * decay)
    else:
        torch._foreach_add_(weights, buffers, alpha=rate)
    moved = torch._foreach_add(gradients, weights, alpha=decay)
    torch._foreach_add_(buffers, moved, alpha=group["dampening"] - 1)
    torch._foreach_div_(buffers, momentum)


def _local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_of(each.detach()) for each in tensors]


def _refusal(kind: type, group: Group) -> str:
    """Why steps with these options can't be computed backwards; "" if they can."""
    if kind not in (torch.optim.AdamW, torch.optim.SGD):
        return f"is for torch's AdamW and SGD, not {kind.__name__}"
    for option in ("amsgrad", "maximize", "fused", "differentiable"):
        if group.get(option):
            return f"does not go with {option}=True"
    if kind is torch.optim.AdamW and not min(group["betas"]) > 0:
        return "needs betas above 0"
    if not float(group["lr"]) * group["weight_decay"] < 1:
        return "needs lr * weight_decay below 1"
    return ""
