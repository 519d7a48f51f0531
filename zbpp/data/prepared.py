"""Prepared tokens: a folder with the tokens of a text. It is made once; every run maps its files.

prepared.json            the header: see `Header`; written last
train.bin                tokens, one after the other, little-endian, of the header's type
train.documents.bin      int64: where each document ends, counted in tokens
held_out.bin, held_out.documents.bin
tokenizer.json           a copy of the tokenizer; none for bytes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zbpp.data.permutation import Numbers
from zbpp.data.windows import Tokens

HEADER, TOKENIZER = "prepared.json", "tokenizer.json"
FORMAT = 1
TRAIN, HELD_OUT = "train", "held_out"
PARTS = (TRAIN, HELD_OUT)
BYTES = "bytes"  # in place of a tokenizer's fingerprint: a token is a byte


@dataclass(frozen=True, kw_only=True)
class PartHeader:
    """One part of a prepared set. checksum: of the file of tokens."""

    num_tokens: int
    num_documents: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a prepared set holds.

    dtype: of the tokens in the files. tokenizer: the fingerprint of the tokenizer's file, or "bytes".
    end_token: the token after each document; None: there is none.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    end_token: int | None
    parts: Mapping[str, PartHeader]
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ if anything of the set differs."""
        return digest_of(json.dumps(asdict(self), sort_keys=True).encode())


class Part(NamedTuple):
    """Tokens, and where each document ends in them (counted in tokens); both arrays are mapped files."""

    tokens: Tokens
    ends: Numbers


class Prepared(NamedTuple):
    """A prepared set that was opened; nothing but the header is read yet."""

    folder: Path
    header: Header

    def part(self, name: str) -> Part:
        """Part "train" or "held_out", mapped. Raises ValueError if a file's length is not the header's."""
        header = self.header.parts[name]
        return Part(
            _mapped(tokens_file(self.folder, name), np.dtype(self.header.dtype), header.num_tokens),
            _mapped(documents_file(self.folder, name), np.dtype(np.int64), header.num_documents),
        )


def open_prepared(path: str | Path) -> Prepared:
    """The prepared set in a folder. Raises FileNotFoundError; ValueError for a header that can't be read."""
    folder = Path(path).expanduser()
    file = folder / HEADER
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no prepared tokens (no {HEADER}; looked from {Path.cwd()}): make them by "
            "scripts/prepare_data.py, or write data=text for a text"
        )
    try:
        found = json.loads(file.read_text())
        found.pop("unigram_entropy", None)  # in headers of older versions
        parts = {name: PartHeader(**part) for name, part in found.pop("parts").items()}
        header = Header(**found, parts=parts)
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{str(file)!r} is no header of prepared tokens ({error}): prepare them again"
        ) from None
    if header.format != FORMAT:
        raise ValueError(f"{str(file)!r} has format {header.format}, this zbpp reads format {FORMAT}")
    return Prepared(folder, header)


def write_header(folder: Path, header: Header) -> None:
    """Write prepared.json."""
    (folder / HEADER).write_text(json.dumps(asdict(header), indent=2) + "\n")


def tokens_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.bin"


def documents_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.documents.bin"


def digest_of(*contents: bytes | memoryview) -> str:
    """16 hex digits of a hash of all contents, one after the other."""
    digest = blake2b(digest_size=8)
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def checksum_of(file: Path) -> str:
    """16 hex digits of a hash of a file."""
    with file.open("rb") as opened:
        return file_digest(opened, lambda: blake2b(digest_size=8)).hexdigest()


def _mapped(file: Path, dtype: np.dtype[Any], length: int) -> Any:
    size = file.stat().st_size if file.exists() else -1
    if size != length * dtype.itemsize:
        found = "is missing" if size < 0 else f"has {size} bytes"
        raise ValueError(
            f"{str(file)!r} {found}, the header says {length * dtype.itemsize}: it was cut or is still being "
            "copied; copy the whole folder, or prepare it again"
        )
    return np.memmap(file, dtype=dtype.newbyteorder("<"), mode="r") if length else np.empty(0, dtype)
