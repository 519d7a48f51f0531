"""Random regression: data for models without text, such as `Mlp` and `Emulated`."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from zbpp.data.source import Data, check_at_least_one
from zbpp.seeding import seed_of


class RandomRegression:
    """Normal inputs, and as targets the outputs of a fixed random layer: data for `Mlp` and `Emulated`."""

    def __init__(self, *, in_features: int, out_features: int, batch_size: int, seed: int) -> None:
        check_at_least_one(in_features=in_features, out_features=out_features, batch_size=batch_size)
        self.batch_size = batch_size
        self.seed = seed
        self._first = 0
        self._teacher = draw(in_features, out_features, seed=seed_of(seed, "teacher")) / in_features**0.5

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs [batch_size, in_features] and targets [batch_size, out_features] in float32."""
        # Each row has a seed of its own: one large batch has the rows of several smaller ones.
        first = (self._first + step) * self.batch_size
        rows = range(first, first + self.batch_size)
        features = len(self._teacher)
        inputs = torch.stack([draw(features, seed=seed_of(self.seed, "row", row)) for row in rows])
        return inputs, torch.tanh(inputs @ self._teacher)

    def offset(self, num_steps: int) -> RandomRegression:
        """The same task; batch 0 is the batch `num_steps` of this one."""
        later = copy(self)
        later._first = self._first + num_steps
        return later


def regression_data(*, in_features: int, out_features: int, batch_size: int, seed: int) -> Data:
    """Random regression. Evaluation takes batches with numbers that training does not reach."""
    source = RandomRegression(
        in_features=in_features, out_features=out_features, batch_size=batch_size, seed=seed
    )
    return Data(
        train=source,
        evaluation=source.offset(2**40),
        num_evaluation_batches=64,  # more than a run takes, for all its replicas together
        items_per_batch=batch_size,
        unit="rows",
        fingerprint=f"regression {in_features} {out_features} {seed}",
    )


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers that depend on `seed` only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
