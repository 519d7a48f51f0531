"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Each group of parameters names its algorithm. A step is a step of torch's Muon over its groups and one of
torch's AdamW over the others, on the groups and states of this optimizer: so `state_dict`, learning-rate
schedulers, clipping and post-validation see one optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from zbpp.training.parameter_groups import Group, Named

MUON, ADAMW = "muon", "adamw"

# Embeddings and heads are matrices, too, but Muon is not for them: most models call them so.
_NOT_HIDDEN = ("*embed*", "*head*", "*wte*", "*wpe*", "*embd*")


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
