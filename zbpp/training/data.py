"""Batches by step: windows of tokens, random regression; and `Data`, what a trainer reads.

A batch depends on the arguments and on the step's number, and on nothing else: there is no state to save, and
any number of ranks sees the same global batches.

For data of your own, name in the config a function, or a torch Dataset class, that makes them (`data=custom
data._target_=my_file.my_data`). The function gets `batch_size` (rows of a whole batch) and `seed` if it takes
them. It returns a torch Dataset, a DataLoader (with that batch size and drop_last=True), a list of batches, a
pair of any of these (to train on, held out), or a `Data`. What a batch may be: zbpp/training/batch.py.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zbpp.seeding import seed_of
from zbpp.training.batch import Source
from zbpp.training.corpus import Tokens, load_corpus


class Batches:
    """Batches of (inputs, targets) from a sequence of tokens, cut into windows that don't overlap.

    Each epoch takes every window once, in an order drawn from (seed, epoch); with `seed` None in the order of
    the text, for evaluation. Tokens at the end that don't fill a window are not used. `name`: what error
    messages call the tokens. Raises ValueError for fewer tokens than a window has.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int | None,
        name: str = "the corpus",
    ) -> None:
        check_at_least_one(sequence_length=sequence_length, batch_size=batch_size)
        if len(tokens) < sequence_length + 1:
            raise ValueError(
                f"sequence_length={sequence_length} needs {sequence_length + 1} tokens (each target is the "
                f"next one), but {name} has {len(tokens)}: write sequence_length={max(1, len(tokens) - 1)} "
                "or less, or give more text"
            )
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self._tokens = tokens
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def num_windows(self) -> int:
        """Samples per epoch."""
        return (len(self._tokens) - 1) // self.sequence_length

    @property
    def num_batches(self) -> int:
        """Full batches per epoch, but at least one: fewer windows than a batch are repeated in it."""
        return max(1, self.num_windows // self.batch_size)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `step` (from 0), int64 [batch_size, sequence_length] each.

        A target is the token after its input. A batch may reach into the next epoch.
        """
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        windows = np.array([self._window(sample) for sample in samples])
        positions = windows[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens = torch.from_numpy(self._tokens[positions].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.num_windows)
        return place if self.seed is None else int(self._epoch_order(self.seed, epoch)[place])

    def _epoch_order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        # Steps ascend, so the order of one epoch is kept: drawing it for each step would be slow.
        if epoch != self._epoch:
            generator = np.random.default_rng(seed_of(seed, "epoch", epoch))
            self._epoch, self._order = epoch, generator.permutation(self.num_windows)
        return self._order


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
        """The same task from `num_steps` later on."""
        later = copy(self)
        later._first = self._first + num_steps
        return later


class Data(NamedTuple):
    """What a trainer reads: batches by step, and facts about them."""

    train: Source
    evaluation: Source
    num_evaluation_batches: int
    items_per_batch: int
    fingerprint: str  # equal on two ranks that read the same data
    unigram_entropy: float | None = None  # nats per token
    unit: str = "tokens"  # what the items of a batch are: "tokens" or "rows"


def text_data(
    *,
    sequence_length: int,
    vocab_size: int,
    batch_size: int,
    seed: int,
    path: str | None = None,
    pattern: str | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    max_bytes: int | None = None,
    held_out: float = 0.05,
) -> Data:
    """Batches from text or tokens; see `load_corpus`. Raises ValueError also if vocab_size is too small."""
    corpus = load_corpus(
        path, pattern=pattern, tokenizer=tokenizer, dtype=dtype, max_bytes=max_bytes, held_out=held_out
    )
    if corpus.vocab_size > vocab_size:
        raise ValueError(
            f"the data has {corpus.vocab_size} tokens, the model's vocab_size={vocab_size} is smaller: "
            f"write model.vocab_size={corpus.vocab_size}"
        )
    shape = {"sequence_length": sequence_length, "batch_size": batch_size}
    train = Batches(corpus.train, **shape, seed=seed, name="the corpus")
    evaluation = Batches(corpus.held_out, **shape, seed=None, name="the held-out part") if held_out else None
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=evaluation.num_batches if evaluation else 0,
        items_per_batch=batch_size * sequence_length,
        fingerprint=corpus.fingerprint,
        unigram_entropy=corpus.unigram_entropy(),
    )


def regression_data(*, in_features: int, out_features: int, batch_size: int, seed: int) -> Data:
    """Random regression; evaluation draws from steps that training won't reach."""
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


def check_at_least_one(**sizes: int) -> None:
    """Raises ValueError naming the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be positive: write 1 or more")
