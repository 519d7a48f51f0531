"""Batches of tokens and of the tokens that follow them; `text_data` makes them from text files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zbpp.data.corpus import load_corpus
from zbpp.data.permutation import Numbers
from zbpp.data.source import Data, check_at_least_one, unread_data
from zbpp.data.windows import Samples, Tokens, Windows


class Batches:
    """Batches of (inputs, targets) from a sequence of tokens that is cut into windows.

    The arguments, and the order of windows, are those of `Windows`. A batch depends on its number only.
    `from_samples` makes batches of other samples. Raises ValueError for fewer tokens than a window has.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int | None,
        ends: Numbers | None = None,
        name: str = "the corpus",
    ) -> None:
        windows = Windows(tokens, sequence_length=sequence_length, seed=seed, ends=ends, name=name)
        self._take(windows, batch_size)

    @classmethod
    def from_samples(cls, samples: Samples, batch_size: int) -> Batches:
        """Batches of `samples`, such as a mixture's."""
        made = cls.__new__(cls)
        made._take(samples, batch_size)
        return made

    def _take(self, samples: Samples, batch_size: int) -> None:
        check_at_least_one(batch_size=batch_size)
        self.samples, self.batch_size = samples, batch_size

    @property
    def num_batches(self) -> int:
        """Full batches per epoch, but at least one: fewer samples than a batch are repeated in it."""
        return max(1, self.samples.num_samples // self.batch_size)

    def batch(self, step: int) -> Any:
        """Inputs and targets of `step` (from 0), int64 [batch_size, sequence_length] each.

        A target is the token after its input. A batch may reach into the next epoch. If documents are told
        apart, the batch is a dict of input_ids, position_ids (from 0 in each document) and labels.
        """
        first = step * self.batch_size
        tokens, positions = self.samples.rows(np.arange(first, first + self.batch_size))
        inputs, targets = (
            torch.from_numpy(np.ascontiguousarray(each)) for each in (tokens[:, :-1], tokens[:, 1:])
        )
        if positions is None:
            return inputs, targets
        return {"input_ids": inputs, "position_ids": torch.from_numpy(positions), "labels": targets}


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
    is_read: bool = True,
) -> Data:
    """Batches from text or tokens. Arguments and errors: see `load_corpus`; vocab_size: of the model.

    is_read: False on a rank that will ask for no batch: nothing is loaded there. Raises ValueError if
    vocab_size is too small for the data, or the data for a batch.
    """
    if not is_read:
        return unread_data(batch_size * sequence_length)
    corpus = load_corpus(
        path, pattern=pattern, tokenizer=tokenizer, dtype=dtype, max_bytes=max_bytes, held_out=held_out
    )
    if corpus.vocab_size > vocab_size:
        raise ValueError(
            f"the data has {corpus.vocab_size} tokens, the model's vocab_size={vocab_size} is smaller: "
            f"write model.vocab_size={corpus.vocab_size}"
        )
    shape: dict[str, Any] = {"sequence_length": sequence_length, "batch_size": batch_size}
    train = Batches(corpus.train, **shape, seed=seed, name="the corpus")
    check_fills_a_batch(train, "the corpus")
    evaluation = Batches(corpus.held_out, **shape, seed=None, name="the held-out part") if held_out else None
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=evaluation.num_batches if evaluation else 0,
        items_per_batch=batch_size * sequence_length,
        fingerprint=corpus.fingerprint,
        unigram_entropy=corpus.unigram_entropy(),
    )


def check_fills_a_batch(batches: Batches, name: str) -> None:
    """Raises ValueError for fewer samples than a batch takes: it would hold the same text several times."""
    found, wanted = batches.samples.num_samples, batches.batch_size
    if found < wanted:
        raise ValueError(
            f"{name} has {found} windows of sequence_length tokens, and a batch takes {wanted}: give more "
            "text, or write a smaller microbatch_size, num_microbatches or model.sequence_length"
        )
