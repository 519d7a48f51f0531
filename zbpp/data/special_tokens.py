"""The tokens with which a tokenizer begins a text, and those that end one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The second overrides the first.
_NAMING = ("special_tokens_map.json", "tokenizer_config.json")


def begin_and_ends(tokenizer: Tokenizer, folder: Path) -> tuple[int | None, frozenset[int]]:
    """(BOS, the tokens that end a text): None and an empty set where nothing names them.

    folder: of the tokenizer.json. The files beside it name the tokens. If they name none, the tokens are
    those that the tokenizer itself puts around a text. generation_config.json may have further end tokens.
    """
    begin, end = (_named(tokenizer, folder, name) for name in ("bos_token", "eos_token"))
    plain, whole = (tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
    num_before = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    if begin is None and num_before:
        begin = whole[0]
    if end is None and num_before + len(plain) < len(whole):
        end = whole[-1]
    more = _json(folder / "generation_config.json").get("eos_token_id")
    numbers = [end, *(more if isinstance(more, list) else [more])]
    return begin, frozenset(each for each in numbers if isinstance(each, int))


def _named(tokenizer: Tokenizer, folder: Path, name: str) -> int | None:
    found = None
    for path in (folder / each for each in _NAMING):
        value = _json(path).get(name)
        text = value.get("content") if isinstance(value, dict) else value
        found = tokenizer.token_to_id(text) if isinstance(text, str) else found
    return found


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
