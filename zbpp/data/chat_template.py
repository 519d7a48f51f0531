"""A conversation as tokens, by a chat template, and which of the tokens are learned.

A line of a jsonl file is {"messages": [...]}. It may have, beside the messages,

    tools, documents, enable_thinking    what the template gets under this name
    chat_template_kwargs                 further values for the template, by name
    anything else                        is not read; the run says so

and a message of the assistant may have one of `MARKS`: 0 or false, if it is not learned.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zbpp.data.permutation import Numbers

EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask")
"""Keys by which other frameworks say whether a message is learned: 0 or false, 1 or true."""

_FOR_TEMPLATE = ("tools", "documents", "enable_thinking")  # keys of a line
_READ = ("messages", "chat_template_kwargs", *_FOR_TEMPLATE)

_log = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]


class Conversation(NamedTuple):
    """Tokens, and which of them are learned."""

    tokens: Numbers
    is_target: Numbers  # 0 or 1


def load_chat_tokenizer(tokenizer: str, chat_template: str | None = None) -> Any:
    """transformers' tokenizer with a chat template.

    tokenizer: a folder as transformers saves it, or the tokenizer.json in one. chat_template: jinja, or a
    file of it; None: the tokenizer's own. Raises ValueError if there is no tokenizer or no template.
    """
    from transformers import AutoTokenizer  # lazily: seconds, and optional

    where = Path(tokenizer).expanduser()
    folder = where.parent if where.name == "tokenizer.json" else where
    if not where.exists() or not folder.is_dir():
        raise ValueError(
            f"tokenizer={tokenizer} does not exist: write a folder, or the tokenizer.json in one"
        )
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tokenizer={tokenizer} holds no tokenizer that transformers loads: write the folder of a model, "
            f"with its tokenizer.json (transformers says: {reason[:200]})"
        ) from error
    if chat_template is not None:
        loaded.chat_template = template_text(chat_template)
    if not loaded.chat_template:
        raise ValueError(
            f"tokenizer={tokenizer} has no chat template: write data.chat_template=FILE, jinja as "
            "transformers' apply_chat_template takes it"
        )
    missing = [each for each in ("bos_token", "eos_token") if not getattr(loaded, each)]
    for name in missing:
        if name in str(loaded.chat_template):
            # jinja writes nothing for it: without an end token, a trained model never stops.
            _log.warning("the chat template names %s, which tokenizer=%s lacks", name, tokenizer)
    return loaded


def template_text(chat_template: str) -> str:
    """The jinja of a template, which is given itself or as a file. Raises ValueError if there is no file."""
    if "{" in chat_template:
        return chat_template
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise ValueError(
            f"chat_template={chat_template} is not a file (looked from {Path.cwd()}): write a file of "
            "jinja, or jinja itself"
        )
    return file.read_text(encoding="utf-8")


def encode(tokenizer: Any, messages: Messages, options: Mapping[str, Any] | None = None) -> Conversation:
    """A conversation's tokens by the tokenizer's template, and which of them are learned.

    options: further arguments of transformers' apply_chat_template, such as tools. Learned are the
    assistant's messages, but for those that are marked 0 or false. If the template has {% generation %} and
    {% endgeneration %}, transformers finds the assistant's tokens between them. Otherwise they are those that
    one of its messages adds to the prompt before it. Raises ValueError if they can't be told apart.
    """
    given = dict(options or {})

    def applied(part: Messages, **more: Any) -> Any:
        return tokenizer.apply_chat_template(part, tokenize=True, return_dict=True, **given, **more)

    is_learned = [_is_learned(each) for each in messages if each["role"] == "assistant"]
    if re.search(r"\{%-?\s*generation\s*-?%\}", _template_of(tokenizer, given)):
        found = applied(messages, return_assistant_tokens_mask=True)
        tokens, is_target = np.array(found["input_ids"]), np.array(found["assistant_masks"])
        return Conversation(tokens, _learned(is_target, is_learned))
    whole = applied(messages)["input_ids"]
    is_target = np.zeros(len(whole), dtype=np.int64)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = applied(messages[:number], add_generation_prompt=True)["input_ids"] if number else [None]
        after = applied(messages[: number + 1])["input_ids"]
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise ValueError(
                "the assistant's tokens can't be told apart (it has the first message, the chat template "
                "changes earlier text, or the tokenizer merges characters across the boundary of two "
                "messages): write {% generation %} around them in the template"
            )
        is_target[len(before) : len(after)] = _is_learned(message)
    return Conversation(np.array(whole), is_target)


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Whether no mark of the message says 0 or false. Raises ValueError for a mark other than 0 and 1."""
    marks = {name: message[name] for name in MARKS if message.get(name) is not None}
    for name, value in marks.items():
        if value not in (0, 1):
            raise ValueError(f"a message has {name}={value!r}: write 0 (not learned) or 1 (learned)")
    return all(marks.values())


def _learned(is_target: Numbers, is_learned: Sequence[bool]) -> Numbers:
    """The mask without the messages that are not learned. Raises ValueError if spans don't fit messages."""
    if all(is_learned):
        return is_target
    starts = np.diff(is_target, prepend=0) == 1
    if int(starts.sum()) != len(is_learned):
        raise ValueError(
            f"{len(is_learned)} messages of the assistant have {int(starts.sum())} spans of "
            "{% generation %} in the template, so one that is not to be learned can't be found: put one span "
            "around each message"
        )
    number = np.cumsum(starts)  # of the latest span, from 1
    return is_target * np.array([0, *is_learned], dtype=np.int64)[number]


def _template_of(tokenizer: Any, options: Mapping[str, Any]) -> str:
    """The text of the template that transformers chooses for a conversation."""
    found: str = tokenizer.get_chat_template(None, options.get("tools"))
    return found


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row gives the template beside its messages, each under the key that TRL and verl give it."""
    found = {**(row.get("chat_template_kwargs") or {})}
    found |= {name: row[name] for name in _FOR_TEMPLATE if row.get(name) is not None}
    if isinstance(tools := found.get("tools"), str):  # a table's column has one type, so many hold JSON
        found["tools"] = json.loads(tools)
    return {name: value for name, value in found.items() if value is not None and value != []}


@cache
def _names_in(template: str) -> frozenset[str]:
    """The words of a template. A file has few templates and many lines."""
    return frozenset(re.findall(r"\w+", template))


def _unread(row: Mapping[str, Any], options: Mapping[str, Any], template: str) -> set[str]:
    """The keys with a value in a line that neither zbpp nor the chat template names."""
    names = _names_in(template)
    found = {name for name in options if name not in names}
    found |= {name for name, value in row.items() if value and name not in {*_READ, *options}}
    for message in row["messages"]:
        read = {*names, *MARKS} if message["role"] == "assistant" else names
        found |= {
            f"{name} of a message of {message['role']}"
            for name, value in message.items()
            if value and name not in read
        }
    return found


def read_conversations(tokenizer: Any, path: Path) -> tuple[list[Conversation], list[str]]:
    """The conversations in a jsonl file, and what a run says of keys that are not read.

    Raises ValueError, naming the line.
    """
    found = []
    unread: Counter[str] = Counter()
    with path.expanduser().open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    row = json.loads(line)
                    options = _options(row)
                    found.append(encode(tokenizer, row["messages"], options))
                    unread.update(_unread(row, options, _template_of(tokenizer, options)))
            except Exception as error:  # jinja's errors, too: a template may refuse a conversation
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"{path}, line {number}: {reason}; write {EXAMPLE}") from error
    if not found:
        raise ValueError(f"{path} has no conversation: write one JSON object per line, {EXAMPLE}")
    keys = ", ".join(f"{name} {count:,}" for name, count in sorted(unread.items()))
    return found, [
        f"keys that neither zbpp nor the chat template reads, in so many lines: {keys}"
    ] if keys else []
