"""The optimizers of the config, and their learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zbpp.training.optim.parameter_groups import Entry, Group, Named, as_named, grouped

Parameters = Iterable[nn.Parameter | Named]


def adamw(
    parameters: Parameters,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    entries: Sequence[Entry] = (),
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay is for matrices, not for biases and norm scales.

    entries: other options for parameters by their names, see parameter_groups.py.
    """
    kinds = [{"weight_decay": weight_decay}, {"weight_decay": 0.0}]

    def split(named: Named, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return kinds[0 if named.parameter.dim() >= 2 else 1]

    groups = grouped(as_named(parameters), entries, split, kinds)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)


def muon(
    parameters: Parameters,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum: float = 0.95,
    entries: Sequence[Entry] = (),
) -> torch.optim.Optimizer:
    """torch's Muon over the matrices of hidden layers, AdamW over the rest: see MuonAndAdamW."""
    of_muon = {"algorithm": MUON, "momentum": momentum, "weight_decay": weight_decay}
    of_adamw = {"algorithm": ADAMW, "betas": betas, "eps": eps}
    kinds = [of_muon, {**of_adamw, "weight_decay": weight_decay}, {**of_adamw, "weight_decay": 0.0}]

    def split(named: Named, options: Any) -> Any:
        if is_for_muon(named, options.get("algorithm")):
            return kinds[0]
        return kinds[1 if named.parameter.dim() >= 2 else 2]

    return MuonAndAdamW(grouped(as_named(parameters), entries, split, kinds), lr=learning_rate)


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def warmup_cosine(step: int, *, num_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """The factor on the learning rate at a step.

    It rises linearly from 1/warmup_steps to 1 in the warm-up, then falls along a cosine to min_ratio.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def warmup_linear(step: int, *, num_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """As warmup_cosine, but the rate falls along a line."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return 1 - (1 - min_ratio) * min(1.0, progress)


def warmup_constant(step: int, *, warmup_steps: int) -> float:
    """As warmup_cosine, but the rate stays."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def warmup_stable_decay(
    step: int, *, num_steps: int, warmup_steps: int, decay_steps: int, min_ratio: float
) -> float:
    """WSD (arXiv:2404.06395): the rate rises, stays, and falls in the last decay_steps along a line.

    It reaches min_ratio in the last step.
    """
    stable = warmup_constant(step, warmup_steps=warmup_steps)
    left = (num_steps - 1 - step) / max(1, decay_steps)
    return min(stable, min_ratio + (1 - min_ratio) * min(1.0, max(0.0, left)))


# ----------------------------------------------------------------
# Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.
#
# Each group of parameters names its algorithm. A step is a step of torch's Muon over its groups and one of
# torch's AdamW over the others, on the groups and states of this optimizer: so `state_dict`, learning-rate
# schedulers, clipping and post-validation see one optimizer.

MUON, ADAMW = "muon", "adamw"

# Embeddings, heads and the stacked biases of experts are matrices, too, but Muon is not for them: most models
# call them so.
_NOT_HIDDEN = ("*embed*", "*head*", "*wte*", "*wpe*", "*embd*", "*bias")


def is_for_muon(named: Named, wanted: str | None) -> bool:
    """Whether Muon updates the parameter: a matrix that is no embedding and no head, by its names.

    wanted: the algorithm that the config names for the parameter; None: none. Raises ValueError if this
    algorithm can't update the parameter.
    """
    if wanted not in (None, MUON, ADAMW):
        raise ValueError(f"algorithm={wanted}: write {MUON} or {ADAMW}")
    is_matrix = named.parameter.dim() == 2
    if wanted == MUON and not is_matrix:
        raise ValueError(
            f"algorithm=muon for {', '.join(named.names)}, which has {named.parameter.dim()} dimensions, and "
            "Muon is for matrices: write algorithm: adamw, or another pattern"
        )
    if wanted is not None:
        return wanted == MUON
    is_outer = any(fnmatchcase(name.lower(), pattern) for name in named.names for pattern in _NOT_HIDDEN)
    return is_matrix and not is_outer


class MuonAndAdamW(torch.optim.Optimizer):
    """groups: each with its `algorithm`, muon or adamw, and options of that algorithm. lr: the default.

    Muon's steps are scaled so that a learning rate and a weight decay for AdamW fit it (torch's
    adjust_lr_fn="match_rms_adamw"), unless a group says otherwise.
    """

    def __init__(self, groups: Iterable[Group], *, lr: float) -> None:
        groups = list(groups)
        makers: dict[str, Callable[[list[Group]], torch.optim.Optimizer]] = {
            MUON: lambda own: torch.optim.Muon(own, lr=lr, adjust_lr_fn="match_rms_adamw"),
            ADAMW: lambda own: torch.optim.AdamW(own, lr=lr),
        }
        # Each writes its defaults into the dicts of its groups, which become this optimizer's groups below.
        self._members = {
            name: make([group for group in groups if group["algorithm"] == name])
            for name, make in makers.items()
        }
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, member in self._members.items():
            # load_state_dict and post-validation replace the groups and the states.
            member.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            member.state = self.state
            member.step()
        return loss
