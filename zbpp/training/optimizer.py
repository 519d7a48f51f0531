"""AdamW and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    kahan_sum: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over the trainable ones of the parameters; matrices decay, biases and norm scales don't.

    kahan_sum: of 16-bit weights, what rounding takes off an update is kept and added later. This is
    torch-optimi's AdamW, of the same formula.
    """
    trained = [p for p in parameters if p.requires_grad]
    # A group may be empty: a rank whose stages are all frozen has nothing to update.
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if kahan_sum:
        from optimi import AdamW

        return AdamW(groups, lr=learning_rate, betas=betas, eps=eps, kahan_sum=True)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)


def warmup_cosine(step: int, *, num_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """The factor on the learning rate at a step.

    It rises linearly from 1/warmup_steps to 1 in the warm-up, then falls along a cosine to min_ratio.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
