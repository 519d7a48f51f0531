"""Documents to tokens: bytes, or any tokenizer of Hugging Face's package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zbpp.data.corpus import load_tokenizer
from zbpp.data.prepared import BYTES, digest_of
from zbpp.data.windows import Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 200  # documents that a tokenizer gets at once


class Encoder(NamedTuple):
    """How documents become tokens. It names the tokenizer's file, so that it can be sent to other processes.

    tokenizer: the path of a tokenizer.json; None: a token is a byte. end_token: the number of the token after
    each document; None: no token.
    """

    tokenizer: str | None
    end_token: int | None
    vocab_size: int
    fingerprint: str

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest type of a file that holds all tokens."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(self, documents: Iterable[str]) -> Iterator[Tokens]:
        """The tokens of each document, with the end token.

        Bytes that are no UTF-8 stay as they are where a token is a byte; a tokenizer gets the replacement
        character for them.
        """
        end = [] if self.end_token is None else [self.end_token]
        if self.tokenizer is None:
            for document in documents:
                tokens = np.frombuffer(as_bytes(document), dtype=np.uint8).astype(self.dtype)
                yield np.append(tokens, np.asarray(end, self.dtype))
            return
        tokenizer, rest = _loaded(self.tokenizer), iter(documents)
        while batch := [as_bytes(each).decode(errors="replace") for each in islice(rest, _BATCH)]:
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray([*encoding.ids, *end], dtype=self.dtype)


def as_bytes(document: str) -> bytes:
    """The document as UTF-8. Bytes that were no UTF-8 in its file are the same bytes again."""
    try:
        return document.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half a character, as an escape in JSON may write it
        return document.encode(errors="replace")


def make_encoder(tokenizer: Path | None, end_token: str | None) -> Encoder:
    """The Encoder of a tokenizer.json, or of bytes (None).

    end_token: the text of the token after each document, None for no token; for bytes write "", which stands
    for token 256. Raises FileNotFoundError; ValueError for a tokenizer that can't be read or lacks the token.
    """
    if tokenizer is None:
        if end_token:
            raise ValueError(f"--end-token {end_token!r} needs --tokenizer; of bytes it is ''")
        has_end = end_token is not None
        return Encoder(None, 256 if has_end else None, 256 + has_end, BYTES)
    loaded = load_tokenizer(tokenizer)
    number = None if end_token is None else loaded.token_to_id(end_token)
    if end_token is not None and number is None:
        special = [token.content for token in loaded.get_added_tokens_decoder().values()]
        raise ValueError(
            f"tokenizer {str(tokenizer)!r} has no token {end_token!r}; its special tokens: "
            f"{', '.join(special) or 'none'}"
        )
    # Numbers may have gaps: the largest one decides how many rows an embedding needs.
    vocab_size = max(loaded.get_vocab(with_added_tokens=True).values()) + 1
    return Encoder(str(tokenizer), number, vocab_size, fingerprint_of(tokenizer))


def fingerprint_of(tokenizer: Path) -> str:
    """16 hex digits of a hash of the tokenizer's file."""
    return digest_of(tokenizer.read_bytes())


@lru_cache(maxsize=1)
def _loaded(path: str) -> Tokenizer:
    # Once a process: reading a large vocabulary takes a second.
    return load_tokenizer(Path(path))
