"""The instructions of features: values with a text, which passes insert into programs."""

from __future__ import annotations

from typing import NamedTuple

from zbpp.schedule.gate import Gate


class ZeroCopies(NamedTuple):
    """Set the gradients of tied copies to zero: their owner's holds the sum of earlier steps."""

    def __str__(self) -> str:
        return "Zero copies"


class ReduceShared(NamedTuple):
    """Reduce the gradients of parameters that several stages or ranks share, and of the loss."""

    def __str__(self) -> str:
        return "Reduce shared parameters"


class HeadW(NamedTuple):
    """The part of a W that holds large gradients: the W of a language model's head."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"HeadW {self.stage}W{self.microbatch}"


class Accumulate(NamedTuple):
    """Give a microbatch's gradients to the states of the optimizer, and drop them."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"Accumulate {self.stage}W{self.microbatch}"


class Update(NamedTuple):
    """Update a stage's weights: their gradients are final."""

    stage: int

    def __str__(self) -> str:
        return f"Update {self.stage}"


class PassGate(NamedTuple):
    """Wait until the last update of the weights is known to be right: an instruction at the rank's gate."""

    gate: Gate

    def __str__(self) -> str:
        return "Gate"
