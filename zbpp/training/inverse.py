"""Taking back a step of AdamW or SGD by computing it backwards: no copy, but not exact.

With the gradient g, which is still there, step t of AdamW is undone by (arXiv:2401.10241, section 4):

    theta <- (theta + lr * m_hat / (sqrt(v_hat) + eps)) / (1 - lr * weight_decay)
    m     <- (m - (1 - b1) * g) / b1
    v     <- (v - (1 - b2) * g^2) / b2
    t     <- t - 1

The results are rounded: docs/optimizer.md says by how much they differ from what was there.
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
from zbpp.training.rollback import Options

Group = dict[str, Any]
States = Mapping[Tensor, dict[str, Any]]


class InverseRollback:
    """A Rollback for torch's AdamW and SGD. Raises ValueError for another optimizer, and for some options."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            refusal = _refusal(type(optimizer), group)
            if refusal:
                raise ValueError(f"rollback=inverse {refusal}: write rollback=exact")
        self._undo: Callable[[Group, list[nn.Parameter], States], None] = (
            undo_adamw if type(optimizer) is torch.optim.AdamW else undo_sgd
        )
        self._optimizer, self._options = optimizer, Options(optimizer)
        self._fresh: list[nn.Parameter] = []  # those that had no state before the step
        self._has_stepped = False

    def keep(self, scaled: list[Tensor]) -> None:
        """Remember the options, and which parameters have no state yet."""
        if scaled:
            raise ValueError(
                "rollback=inverse needs the gradients as they are, and a loss scale is divided out of them: "
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
    """Undo a step of AdamW over parameters of one group."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    by_step: dict[float, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        by_step[float(state[parameter]["step"])].append(parameter)
    for step, some in by_step.items():
        weights, gradients = _locals(some), _locals([each.grad for each in some if each.grad is not None])
        first = _locals(state[each]["exp_avg"] for each in some)
        second = _locals(state[each]["exp_avg_sq"] for each in some)
        divisors = torch._foreach_sqrt(second)
        torch._foreach_div_(divisors, math.sqrt(1 - beta2**step))
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_addcdiv_(weights, first, divisors, value=rate / (1 - beta1**step))
        torch._foreach_div_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_add_(first, gradients, alpha=beta1 - 1)
        torch._foreach_div_(first, beta1)
        torch._foreach_addcmul_(second, gradients, gradients, value=beta2 - 1)
        torch._foreach_div_(second, beta2)
        torch._foreach_clamp_min_(second, 0.0)  # a rounding error below zero would give NaN by the root
        for parameter in some:
            state[parameter]["step"] -= 1


def undo_sgd(group: Group, parameters: list[nn.Parameter], state: States) -> None:
    """Undo a step of SGD over parameters of one group.

    With d = g + weight_decay * theta:  buffer <- momentum * buffer + (1 - dampening) * d, in the first step
    d;  theta <- theta - lr * u, where u is d without momentum, the buffer with it, and with Nesterov's
    d + momentum * buffer.
    """
    rate, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
    weights, gradients = (
        _locals(parameters),
        _locals([each.grad for each in parameters if each.grad is not None]),
    )
    if not momentum:
        torch._foreach_add_(weights, gradients, alpha=rate)
        torch._foreach_div_(weights, 1 - rate * decay)
        return
    buffers = _locals(state[each]["momentum_buffer"] for each in parameters)
    if group["nesterov"]:
        torch._foreach_add_(weights, gradients, alpha=rate)
        torch._foreach_add_(weights, buffers, alpha=rate * momentum)
        torch._foreach_div_(weights, 1 - rate * decay)
    else:
        torch._foreach_add_(weights, buffers, alpha=rate)
    moved = torch._foreach_add(gradients, weights, alpha=decay)
    torch._foreach_add_(buffers, moved, alpha=group["dampening"] - 1)
    torch._foreach_div_(buffers, momentum)


def _locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_of(each.detach()) for each in tensors]


def _refusal(kind: type, group: Group) -> str:
    """What can't be computed backwards, or nothing."""
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
