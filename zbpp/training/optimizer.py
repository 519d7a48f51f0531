"""The optimizers of the config, and their learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

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
    gradient_release: str = "off",
) -> torch.optim.Optimizer:
    """AdamW over the trainable ones of the parameters; matrices decay, biases and norm scales don't.

    kahan_sum: of 16-bit weights, what rounding takes off an update is kept and added later. With it, and with
    gradient_release=accumulate, this is torch-optimi's AdamW, of the same formula.
    """
    if kahan_sum or gradient_release == "accumulate":
        return _of_optimi(
            "AdamW",
            parameters,
            learning_rate=learning_rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            kahan_sum=kahan_sum,
            gradient_release=gradient_release,
        )
    groups = _groups(parameters, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)


def _of_optimi(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float | None,
    weight_decay: float,
    kahan_sum: bool = False,
    gradient_release: str = "off",
) -> torch.optim.Optimizer:
    """An optimizer of torch-optimi by its name there. eps: None for one that takes none."""
    import optimi

    more: dict[str, Any] = {} if eps is None else {"eps": eps}
    optimizer: torch.optim.Optimizer = getattr(optimi, name)(
        _groups(parameters, weight_decay),
        lr=learning_rate,
        betas=betas,
        kahan_sum=kahan_sum,
        gradient_release=gradient_release != "off",
        **more,
    )
    return optimizer


def stable_adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """torch-optimi's StableAdamW, which limits each parameter's update by itself: no clipping is needed."""
    return _of_optimi("StableAdamW", parameters, **options)


def lion(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """torch-optimi's Lion: one state per weight, and no eps."""
    return _of_optimi("Lion", parameters, **{**options, "eps": None})


OPTIMIZERS = {"adamw": adamw, "stable_adamw": stable_adamw, "lion": lion}


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: matrices, and the rest without decay."""
    trained = [p for p in parameters if p.requires_grad]
    # A group may be empty: a rank whose stages are all frozen has nothing to update.
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(step: int, *, num_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """The factor on the learning rate at a step.

    It rises linearly from 1/warmup_steps to 1 in the warm-up, then falls along a cosine to min_ratio.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
