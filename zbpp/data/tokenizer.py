"""A tokenizer of Hugging Face's package `tokenizers`, and the tokens with which its texts begin and end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbpp.data.prepared import digest_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The files that name special tokens. The second overrides the first.
_NAMING = ("special_tokens_map.json", "tokenizer_config.json")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. The tokenizer neither cuts nor pads a text, even if its file says so.

    Raises FileNotFoundError if there is none, ValueError if it can't be read or `tokenizers` is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {str(path)!r} is not a file (looked from {Path.cwd()}): name the tokenizer.json "
            "of a Hugging Face model, or none for bytes"
        )
    try:
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_file(str(path))
    except ImportError as error:
        raise ValueError(
            f"tokenizer={str(path)!r} needs `tokenizers`: run `pip install tokenizers`"
        ) from error
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"tokenizer {str(path)!r} can't be read ({error}): name a tokenizer.json") from error
    loaded.no_truncation()  # many files of models hold the length of a training sample
    loaded.no_padding()
    return loaded


def fingerprint_of(tokenizer: Path) -> str:
    """16 hex digits of a hash of the tokenizer's file."""
    return digest_of(tokenizer.read_bytes())


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
