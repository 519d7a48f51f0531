"""Conversations for supervised fine-tuning: from a jsonl file, through a chat template, with a loss mask.

Only the assistant's tokens are targets (chat_template.py finds them); the target of any other position is
-100, which the loss leaves out.

Microbatches and replicas have different numbers of targets. The loss of a step is the mean over all of them,
as if one process had the batch in one piece, if the model's loss is marked by `mean_over_tokens`
(zbpp/stage_api.py).

A row is one conversation, padded at its end to the longest one. Causal attention does not see later tokens,
so the padding needs no mask. Needs the extra `hf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zbpp.data.chat_template import Conversation, load_chat_tokenizer, read_conversations
from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.sequences import Known, Watch
from zbpp.data.source import Data, check_at_least_one, check_share, check_vocab_size, unread_data
from zbpp.seeding import seed_of
from zbpp.stage_api import IGNORED

_STEP = 8  # lengths of rows are multiples: tensor cores ask for them


class ChatBatches:
    """Batches of conversations: (inputs, labels), int64 [batch_size, sequence_length].

    Each epoch takes every conversation once, in an order drawn from (seed, epoch); with `seed` None in the
    order of the file.
    filling: the token of the padding. Raises ValueError if no conversation has a target.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int | None,
        filling: int = 0,
    ) -> None:
        check_at_least_one(sequence_length=sequence_length, batch_size=batch_size)
        self.batch_size, self._length, self._seed, self._filling = batch_size, sequence_length, seed, filling
        cut = [_first(each, sequence_length + 1) for each in conversations]
        self._conversations = [each for each in cut if each.is_target[1:].any()]
        if not self._conversations:
            raise ValueError(
                "no conversation has an assistant's token within sequence_length="
                f"{sequence_length}: write a larger model.sequence_length, or check the roles in the file"
            )

    @property
    def num_conversations(self) -> int:
        """How many conversations there are, without those that have no target."""
        return len(self._conversations)

    @property
    def num_batches(self) -> int:
        """Full batches per epoch, but at least one."""
        return max(1, self.num_conversations // self.batch_size)

    @property
    def tokens_per_row(self) -> float:
        """Inputs of a row that are no padding, on average."""
        return float(np.mean([len(each.tokens) - 1 for each in self._conversations]))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of batch `step`, from 0."""
        inputs = np.full((self.batch_size, self._length), self._filling, dtype=np.int64)
        labels = np.full_like(inputs, IGNORED)
        samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        for row, number in enumerate(self._numbers(samples)):
            own = self._row(number)
            for filled, values in zip((inputs, labels), own, strict=True):
                filled[row, : len(values)] = values
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def sequences(self, watch: Watch) -> Known:
        """The conversations, in the same order."""
        lengths = np.array([len(each.tokens) - 1 for each in self._conversations])

        def read(sample: int) -> tuple[Tensor, Tensor]:
            inputs, labels = self._row(int(self._numbers(np.array([sample]))[0]))
            return torch.from_numpy(inputs), torch.from_numpy(labels)

        return Known(lengths, self._numbers, read)

    def _row(self, number: int) -> tuple[Numbers, Numbers]:
        """Inputs and labels of a conversation, without padding."""
        tokens, is_target = self._conversations[number]
        return tokens[:-1].astype(np.int64), np.where(is_target[1:] == 1, tokens[1:], IGNORED)

    def _numbers(self, samples: Numbers) -> Numbers:
        """The numbers of the conversations that samples are, from 0 through all epochs."""
        epochs, places = np.divmod(samples, self.num_conversations)
        if self._seed is None:
            return places
        return permute(places, self.num_conversations, keys_of(seed_of(self._seed, "order"), epochs))


def _first(conversation: Conversation, length: int) -> Conversation:
    return Conversation(conversation.tokens[:length], conversation.is_target[:length])


def chat_data(
    *,
    path: str,
    tokenizer: str,
    sequence_length: int,
    vocab_size: int,
    batch_size: int,
    seed: int,
    chat_template: str | None = None,
    held_out: float = 0.05,
    is_read: bool = True,
) -> Data:
    """Batches of the conversations in a jsonl file.

    tokenizer, chat_template: see `load_chat_tokenizer`. sequence_length: the most tokens of a row; rows are
    no longer than the longest conversation asks for.
    held_out: the share of conversations that is evaluated on, at the end of the file. is_read: False on a
    rank that will ask for no batch: nothing is loaded there.
    Raises ValueError for a file, a template or a vocabulary that does not fit.
    """
    if not is_read:
        return unread_data(batch_size * sequence_length)
    check_share(held_out)
    conversations, unread = read_conversations(load_chat_tokenizer(tokenizer, chat_template), Path(path))
    check_vocab_size(1 + max(int(each.tokens.max(initial=0)) for each in conversations), vocab_size)
    num_held_out = round(held_out * len(conversations))
    longest = max(len(each.tokens) for each in conversations) - 1
    length = min(sequence_length, -(-longest // _STEP) * _STEP)
    shape: dict[str, Any] = {"sequence_length": length, "batch_size": batch_size}
    train = ChatBatches(conversations[: len(conversations) - num_held_out], **shape, seed=seed)
    if train.num_conversations < batch_size:
        raise ValueError(
            f"{path} has {train.num_conversations} conversations to train on, and a batch takes "
            f"{batch_size}: give more, or write a smaller microbatch_size or num_microbatches"
        )
    held = conversations[len(conversations) - num_held_out :]
    evaluation = ChatBatches(held, **shape, seed=None) if held else None
    num_evaluated = evaluation.num_conversations if evaluation else 0
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=num_evaluated // batch_size,
        items_per_batch=batch_size * sequence_length,
        fingerprint=_fingerprint(conversations),
        num_evaluation_rest=num_evaluated % batch_size,
        padding=1 - train.tokens_per_row / sequence_length,
        notes=(
            f"{train.num_conversations:,} conversations to train on, {num_evaluated:,} held out; rows of "
            f"{length} tokens, {100 * (1 - train.tokens_per_row / length):.0f} % of them padding",
            *_what_is_lost(conversations, length, train.num_conversations + num_evaluated),
            *unread,
        ),
    )


def _what_is_lost(conversations: Sequence[Conversation], length: int, num_kept: int) -> list[str]:
    """Lines on the conversations that are cut at `length`, and on those that are left out."""
    cut = [each for each in conversations if len(each.tokens) > length + 1]
    lost = sum(int(each.is_target[length + 1 :].sum()) for each in cut)
    targets = sum(int(each.is_target[1:].sum()) for each in conversations)
    lines = []
    if cut:
        longest = max(len(each.tokens) for each in cut) - 1
        lines.append(
            f"{len(cut):,} of {len(conversations):,} are cut at model.sequence_length={length}; "
            f"{lost:,} of {targets:,} targets are lost; the longest conversation asks for {longest}"
        )
    if num_left_out := len(conversations) - num_kept:
        lines.append(f"{num_left_out:,} conversations are left out: nothing to learn in the first {length:,}")
    return lines


def _fingerprint(conversations: Sequence[Conversation]) -> str:
    digest = sha256()  # checkpoints hold it
    for tokens, is_target in conversations:
        digest.update(np.array([len(tokens), *tokens, *is_target], dtype=np.int64).data)
    return digest.hexdigest()
