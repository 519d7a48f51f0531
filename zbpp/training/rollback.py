"""Takes back an optimizer's step, to the last bit, by copies.

Before the step, everything that the step may change is copied: parameters, `optimizer.state`, the options in
`optimizer.param_groups`, and the state of torch's random number generator on the CPU. The copies exist from
the update until its verdict: `keep` allocates them, and `forget` frees them for activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.mesh import local_of
from zbpp.training.snapshot import Copies, Options, snapshot
from zbpp.training.trial_step import refusal_of


class Rollback(Protocol):
    """Takes back the last step of an optimizer: by copies, or by computing it backwards (inverse.py)."""

    def keep(self, scaled: list[Tensor], *, steps: bool = True) -> None:
        """Called before the step. scaled: the gradients that the caller will scale in place before it.

        steps: whether a step follows; otherwise only options may change until `undone`.
        """

    def after_step(self, *, has_stepped: bool) -> None:
        """Called after `keep` and the step, if there was one. Raises ValueError if it can't be taken back."""

    def undone(self) -> Any:
        """A context that begins by taking back the step and the scaling; within it the caller may redo both.

        Within the context the optimizer's options (such as the learning rate) have the values that they had
        at `keep`. Afterwards options that the caller changed after the step have their new values again.
        """

    def forget(self) -> None:
        """Free the copies: the step will not be taken back. `undone` needs another `keep` then."""

    def tensors(self) -> list[Tensor]:
        """The copies."""


class ExactRollback:
    """The Rollback by copies. Raises ValueError for an optimizer whose step can't be taken back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refusal = refusal_of(optimizer)
        if refusal:
            raise ValueError(refusal)
        self._optimizer, self._copies = optimizer, Copies()
        self._options = Options(optimizer)
        self._restore_state: Callable[[], Any] = _nothing
        self._generator: Tensor | None = None
        self._gradients: list[tuple[Tensor, int]] = []
        # Whether the step changes gradients in place, as few optimizers do: assumed until a step shows it.
        self._changes_gradients = True

    @property
    def num_bytes(self) -> int:
        """The memory of the copies."""
        return self._copies.num_bytes

    def keep(self, scaled: list[Tensor], *, steps: bool = True) -> None:
        """Copy all tensors that the step may change, and remember the other values."""
        tensors: list[Tensor] = []
        self._options.keep(tensors)
        self._generator = torch.get_rng_state()
        if steps:
            parameters = parameters_of(self._optimizer)
            tensors += parameters
            self._restore_state = snapshot(self._optimizer.state, tensors)
            gradients = [local_of(each) for each in map(total_of, parameters) if each is not None]
            tensors += gradients if self._changes_gradients else scaled
            self._gradients = [] if scaled else [(each, each._version) for each in gradients]
        self._copies.take(tensors)

    def after_step(self, *, has_stepped: bool) -> None:
        """Look at what the step has changed."""
        self._options.after_step()
        if self._gradients:
            self._changes_gradients = any(each._version != version for each, version in self._gradients)
        self._gradients = []  # hold no reference: the next step drops these gradients
        if has_stepped:
            snapshot(self._optimizer.state, [])  # raises ValueError for a state that `keep` can't copy

    @contextmanager
    def undone(self) -> Iterator[None]:
        """See Rollback."""
        generator = torch.get_rng_state()
        self._restore_state()
        with self._options.before_step():
            self._copies.give_back()
            assert self._generator is not None  # `keep` came before
            torch.set_rng_state(self._generator)
            try:
                yield
            finally:
                torch.set_rng_state(generator)

    def tensors(self) -> list[Tensor]:
        """See Rollback."""
        return self._copies.tensors()

    def forget(self) -> None:
        """See Rollback."""
        self._copies, self._restore_state, self._gradients = Copies(), _nothing, []


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of the optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _nothing() -> None:
    pass
