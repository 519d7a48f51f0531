"""Conversations for supervised fine-tuning: from a jsonl file, through a chat template, with a loss mask.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     a line

Only the assistant's tokens are targets; the target of any other position is -100, which the loss leaves out.

Microbatches and replicas have different numbers of targets. The loss of a step is the mean over all targets
of the whole batch, as if one process had it in one piece. So a batch brings `totals` beside its labels: the
number of targets in the step on all replicas, and the number of rows. `token_loss` (zbpp/models/layers.py)
divides by these instead of by the microbatch's own number of targets.

A row is one conversation, padded at its end. Causal attention does not see later tokens, so the padding needs
no mask. Needs the extra `hf`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zbpp.data.chat_tokenizer import check_special_tokens, load_tokenizer
from zbpp.data.permutation import Numbers, keys_of, permute
from zbpp.data.source import Data, check_at_least_one, unread_data
from zbpp.seeding import seed_of

IGNORED = -100  # the target that a cross-entropy leaves out, in torch and in transformers

_log = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]


class Conversation(NamedTuple):
    """Tokens, and which of them the assistant has written."""

    tokens: Numbers
    is_target: Numbers  # 0 or 1


class ChatBatches:
    """Batches of conversations: (inputs, (labels, totals)).

    inputs, labels: int64 [batch_size, sequence_length]; totals: int64 [batch_size, 2], in each row the number
    of targets and of rows of the whole step, over all `num_parts` replicas. Each epoch takes every
    conversation once, in an order drawn from (seed, epoch); with `seed` None in the order of the file.
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
        self.num_without_target = len(cut) - len(self._conversations)
        self._counts = np.array([each.is_target[1:].sum() for each in self._conversations])
        self._num_parts = 1

    def for_parts(self, num_parts: int) -> ChatBatches:
        """The same batches for `num_parts` replicas, which read neighbouring batches in each step.

        Only `totals` differ: they count the targets and rows of all replicas.
        """
        other = copy(self)
        other._num_parts = num_parts
        return other

    @property
    def num_conversations(self) -> int:
        """How many conversations there are, without those that have no target."""
        return len(self._conversations)

    @property
    def num_batches(self) -> int:
        """Full batches per epoch, but at least one."""
        return max(1, self.num_conversations // self.batch_size)

    def batch(self, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Inputs, labels and totals of batch `step`, from 0."""
        inputs = np.full((self.batch_size, self._length), self._filling, dtype=np.int64)
        labels = np.full_like(inputs, IGNORED)
        for row, number in enumerate(self._numbers(step, 1)):
            tokens, is_target = self._conversations[number]
            size = len(tokens) - 1
            inputs[row, :size] = tokens[:-1]
            labels[row, :size] = np.where(is_target[1:] == 1, tokens[1:], IGNORED)
        first = step // self._num_parts * self._num_parts
        together = self._numbers(first, self._num_parts)
        totals = torch.tensor([[int(self._counts[together].sum()), len(together)]] * self.batch_size)
        return torch.from_numpy(inputs), (torch.from_numpy(labels), totals)

    def _numbers(self, step: int, num_batches: int) -> Numbers:
        """The numbers of the conversations in `num_batches` batches, from batch `step` on."""
        samples = np.arange(step * self.batch_size, (step + num_batches) * self.batch_size)
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

    tokenizer: see chat_tokenizer.py. chat_template: jinja, or a file of it; None: the tokenizer's own.
    held_out: the share of conversations that is evaluated on, at the end of the file. is_read: False on a
    rank that will ask for no batch: nothing is loaded there.
    Raises ValueError for a file, a template or a vocabulary that does not fit.
    """
    if not is_read:
        return unread_data(batch_size * sequence_length)
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} is a share of the conversations: write 0.0 to 0.99")
    loaded = load_tokenizer(tokenizer, chat_template)
    conversations = [
        _encoded(loaded, messages, f"{path}, line {number}") for number, messages in _lines(Path(path))
    ]
    largest = max(int(each.tokens.max(initial=0)) for each in conversations)
    if largest >= vocab_size:
        raise ValueError(
            f"the data has token {largest}, the model's vocab_size={vocab_size} is smaller: write "
            f"model.vocab_size={largest + 1} or more, or the model's own tokenizer"
        )
    num_held_out = round(held_out * len(conversations))
    shape: dict[str, Any] = {"sequence_length": sequence_length, "batch_size": batch_size}
    train = ChatBatches(conversations[: len(conversations) - num_held_out], **shape, seed=seed)
    if train.num_conversations < batch_size:
        raise ValueError(
            f"{path} has {train.num_conversations} conversations to train on, and a batch takes "
            f"{batch_size}: give more, or write a smaller microbatch_size or num_microbatches"
        )
    if train.num_without_target:
        _log.warning(
            "%d conversations have no assistant's token within sequence_length=%d, and are left out",
            train.num_without_target,
            sequence_length,
        )
    held = conversations[len(conversations) - num_held_out :]
    evaluation = ChatBatches(held, **shape, seed=None) if held else None
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=evaluation.num_conversations // batch_size if evaluation else 0,
        items_per_batch=batch_size * sequence_length,
        fingerprint=_fingerprint(conversations),
    )


# ---------------------------------------------------------------- text to tokens


def encode(tokenizer: Any, messages: Messages) -> Conversation:
    """A conversation's tokens by the tokenizer's template, and which of them are the assistant's.

    If the template has {% generation %} and {% endgeneration %}, the tokens between them are the assistant's.
    Otherwise the assistant's tokens are those that one of its messages adds to the prompt before it. Raises
    ValueError if adding a message changes the tokens of earlier text, or if the template writes a special
    token that the tokenizer lacks.
    """
    check_special_tokens(tokenizer, messages)
    _check_contents(tokenizer, messages)
    options: dict[str, Any] = {"tokenize": True, "return_dict": True}
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
        return Conversation(np.array(found["input_ids"]), np.array(found["assistant_masks"]))

    def tokens(count: int, *, is_asked: bool = False) -> list[int]:
        given = messages[:count]
        found = tokenizer.apply_chat_template(given, add_generation_prompt=is_asked, **options)
        return list(found["input_ids"])

    whole = tokens(len(messages))
    is_target = np.zeros(len(whole), dtype=np.int64)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError(
                "the conversation begins with the assistant, and the template does not say which tokens are "
                "the assistant's: begin with a message of the user, or write {% generation %} in the template"
            )
        before, after = tokens(number, is_asked=True), tokens(number + 1)
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise ValueError(
                "the first tokens change when a message is added (the chat template changes earlier text, or "
                "the tokenizer merges characters across the boundary of two messages), so the assistant's "
                "tokens can't be told apart: write {% generation %} around them in the template"
            )
        is_target[len(before) : len(after)] = 1
    return Conversation(np.array(whole), is_target)


def _check_contents(tokenizer: Any, messages: Messages) -> None:
    """Raise ValueError if the template writes a content that is no text as Python prints it: [{'type': ..."""
    contents = [message["content"] for message in messages]
    if all(isinstance(each, str) for each in contents):
        return
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    for content in contents:
        shown = str(content)
        if not isinstance(content, str) and text.count(shown) > sum(
            each.count(shown) for each in contents if isinstance(each, str)
        ):
            raise ValueError(
                f"the template writes the content {shown[:60]} as it stands, for the model to learn: write "
                "a text as content, or a template that takes such contents"
            )


def _encoded(tokenizer: Any, messages: Messages, where: str) -> Conversation:
    try:
        return encode(tokenizer, messages)
    except Exception as error:  # jinja's errors, too: a template may refuse a conversation
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def _lines(path: Path) -> list[tuple[int, Messages]]:
    """(number of the line, its messages). Raises ValueError."""
    found = []
    with path.expanduser().open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append((number, _messages(line, f"{path}, line {number}")))
    if not found:
        raise ValueError(f"{path} has no conversation: write one JSON object per line")
    return found


def _messages(line: str, where: str) -> Messages:
    example = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON ({error}): write {example}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    is_right = isinstance(messages, list) and all(map(_is_message, messages))
    if not messages or not is_right:
        raise ValueError(f"{where} has no list of messages with role and content: write {example}")
    found: Messages = messages
    return found


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _fingerprint(conversations: Sequence[Conversation]) -> str:
    digest = hashlib.sha256()
    for tokens, is_target in conversations:
        digest.update(np.int64(len(tokens)).tobytes())
        digest.update(tokens.astype(np.int64).tobytes())
        digest.update(is_target.astype(np.int64).tobytes())
    return digest.hexdigest()
