"""Batches of text: windows of tokens, inputs and the tokens that follow them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zbpp.data.corpus import Tokens, load_corpus
from zbpp.data.source import Data, check_at_least_one
from zbpp.seeding import seed_of


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
