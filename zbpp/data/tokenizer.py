"""A tokenizer of Hugging Face's package `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.data.prepared import digest_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
