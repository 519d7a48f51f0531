"""What is put back after a call: random numbers, training mode, and the gradients of a step that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_MARK = "zbpp_partial"  # attribute of a gradient that holds a part of a failed step: its _version then


class GradientsBefore:
    """The gradients as they are before a step. Raises RuntimeError if one holds a part of a failed step.

    Nothing is copied: a gradient that was there already and was added to can't be restored. It is marked,
    and stays refused until it is dropped, or changed in place (`zero_grad` does either).
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._grads = [(each, each.grad) for each in parameters]
        totals = [getattr(each, "main_grad", None) for each, _ in self._grads]
        totals += [grad for _, grad in self._grads]
        self._versions = [(total, total._version) for total in totals if total is not None]
        if any(getattr(total, _MARK, None) == version for total, version in self._versions):
            raise RuntimeError(
                "gradients hold a part of a step that failed: zero or drop them on every rank "
                "(optimizer.zero_grad()), then begin the batch again with its first step"
            )

    def restore(self) -> str:
        """Drop what was added since; what could not be undone, in words, or nothing."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        changed = [total for total, version in self._versions if total._version != version]
        for total in changed:
            _mark(total)
        if not changed:
            return ""
        return (
            f"{len(changed)} gradients that were there before this step now hold a part of it: zero or drop "
            "the gradients on every rank (optimizer.zero_grad()); step refuses to add to them"
        )


def _mark(total: Tensor) -> None:
    setattr(total, _MARK, total._version)


@contextmanager
def restored_generators(device: torch.device) -> Iterator[None]:
    """What a step draws is seeded by its place; the caller's own random numbers go on undisturbed."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def eval_mode(roots: Iterable[object]) -> Iterator[None]:
    """Evaluation of those that are modules; each module is afterwards in the mode that it was in."""
    found = [root for root in roots if isinstance(root, nn.Module)]
    modes = [(module, module.training) for root in found for module in root.modules()]
    for root in found:
        root.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
