"""Tokens from files: the bytes of a text, a text through a tokenizer, or tokens that were made before."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.NDArray[Any]
"""A sequence of tokens, any integer type."""

NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
TOKEN_TYPES = ("uint16", "uint32", "int32", "int64", "uint8")
# The first bytes of compressed files, with which no text begins. Other binary files hold NUL bytes.
BINARY_STARTS = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"(\xb5/\xfd": "Zstandard",
    b"\xfd7zXZ": "xz",
    b"\x93NUMPY": "NumPy",
}
STANDARD_LIBRARY_BYTES = 4 * 2**20  # about a third of its sources: enough for a demo, read in 0.1 s
_BLOCK = 2**22  # tokens counted at once: a mapped file may be larger than the memory


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of a text; the last `num_held_out` are for evaluation only."""

    tokens: Tokens
    vocab_size: int
    num_held_out: int

    @property
    def train(self) -> Tokens:
        """The tokens to train on."""
        return self.tokens[: len(self.tokens) - self.num_held_out]

    @property
    def held_out(self) -> Tokens:
        """The tokens to evaluate on."""
        return self.tokens[len(self.tokens) - self.num_held_out :]

    @property
    def fingerprint(self) -> str:
        """16 hex digits, equal on two ranks if they read the same tokens and hold out as many of them."""
        shape = f"{self.tokens.dtype} {self.vocab_size} {self.num_held_out}".encode()
        digest = blake2b(shape, digest_size=8)
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()

    def unigram_entropy(self) -> float:
        """Entropy of single tokens in nats: the loss of the best model that ignores the context."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, len(self.tokens), _BLOCK):
            block = self.tokens[start : start + _BLOCK].astype(np.int64)
            counts += np.bincount(block, minlength=self.vocab_size)
        frequencies = counts[counts > 0] / len(self.tokens)
        return float(-(frequencies * np.log(frequencies)).sum())


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    pattern: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_bytes: int | None = None,
    held_out: float = 0.05,
) -> Corpus:
    """Read a text file, the files below a folder whose names match `pattern`, or a file of tokens.

    `path` None: 4 MiB of the sources of this machine's Python standard library, without tests and packages.
    `pattern` None: `*.py` there, `*.txt` in a folder of yours. A token is a byte, unless `tokenizer` names a
    Hugging Face `tokenizers` JSON file. A `.npy` file holds a sequence of tokens, a `.bin` file raw numbers
    of type `dtype` ("uint16"); both are mapped, not loaded. `max_bytes`: where to stop reading. `held_out`:
    the share of tokens kept for evaluation, at the end. Raises FileNotFoundError if there is no such file,
    ValueError for an empty or binary file and for an argument that doesn't fit.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} is a share of the corpus: write 0.0 to 0.99")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} leaves nothing to read: write 1 or more, or None for all")
    encoder = None if tokenizer is None else load_tokenizer(Path(tokenizer))
    source, files = corpus_files(path, pattern)
    limit = STANDARD_LIBRARY_BYTES if path is None and max_bytes is None else max_bytes
    ready_made = files[0] if source.suffix in (".npy", ".bin") and source.is_file() else None
    if ready_made is not None:
        tokens = map_tokens(ready_made, dtype, limit, encoder)
    elif dtype is not None:
        raise ValueError(f"dtype={dtype} is for a .bin file of tokens, {source} is none: leave it out")
    else:
        text = read_text(files, limit)
        tokens = np.frombuffer(text, dtype=np.uint8) if encoder is None else encode(text, encoder)
    if len(tokens) == 0:
        raise ValueError(f"the corpus {source} is empty: {len(files)} files, no text; name another data path")
    vocab_size = 256 if encoder is None else encoder.get_vocab_size()
    if ready_made is not None:
        vocab_size = int(tokens.max()) + 1
    return Corpus(tokens, vocab_size, num_held_out=int(len(tokens) * held_out))


def corpus_files(path: str | os.PathLike[str] | None, pattern: str | None) -> tuple[Path, list[Path]]:
    """(the folder or file that `path` names, the files to read from it)."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        return library, find_files(library, pattern or "*.py", skip=NOT_SOURCES)
    source = Path(path).expanduser()
    if not source.exists():
        raise FileNotFoundError(
            f"data path {str(source)!r} does not exist (looked from {Path.cwd()}): name a text file or "
            "a folder of them, or none for the Python standard library's sources"
        )
    return source, [source] if source.is_file() else find_files(source, pattern or "*.txt")


def find_files(folder: Path, pattern: str, skip: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `folder` whose names match, in an order that only their relative paths decide.

    The order is by hash, not by name. So what is read if reading stops early, and what is held out at the
    end, are samples of all files, not the first or last letters of the alphabet. Raises ValueError if none
    match.
    """
    names = sorted(relative_paths(folder, skip))
    matching = [name for name in names if fnmatch(os.path.basename(name), pattern)]
    if not matching:
        kinds = Counter(f"*{os.path.splitext(name)[1]}" for name in names).most_common(4)
        found = ", ".join(f"{count} of {kind}" for kind, count in kinds) or "no file at all"
        raise ValueError(f"no file in {str(folder)!r} matches pattern={pattern!r}: it holds {found}")
    return [folder / name for name in sorted(matching, key=seed_of)]


def relative_paths(folder: Path, skip: frozenset[str]) -> Iterator[str]:
    """The paths of all files below `folder`, with forward slashes; folders in `skip` aren't entered."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip]
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in names)


def read_text(files: list[Path], limit: int | None) -> bytes:
    """The files' contents one after the other, cut at `limit` bytes. Raises ValueError for binary files."""
    parts: list[bytes] = []
    size = 0
    for file in files:
        if limit is not None and size >= limit:
            break
        parts.append(file.read_bytes())
        check_text(file, parts[-1])
        size += len(parts[-1])
    return b"".join(parts)[:limit]


def check_text(file: Path, content: bytes) -> None:
    """Raises ValueError for a binary file, which would be trained on as if it were text."""
    kind = next((kind for start, kind in BINARY_STARTS.items() if content.startswith(start)), None)
    if kind is not None or b"\0" in content:
        what = f"is a {kind} file" if kind is not None else "holds NUL bytes, as binary files and UTF-16 do"
        raise ValueError(
            f"{str(file)!r} is no text: it {what}; write it as UTF-8 text, or as tokens: one .npy file of "
            "whole numbers, or one .bin file with dtype=uint16"
        )


def map_tokens(file: Path, dtype: str | None, limit: int | None, tokenizer: Tokenizer | None) -> Tokens:
    """The tokens of a .npy or .bin file, cut at `limit` bytes. Raises ValueError, saying what it holds."""
    if tokenizer is not None:
        raise ValueError(f"{str(file)!r} holds tokens already: leave tokenizer out")
    if file.suffix == ".npy" and dtype is not None:
        raise ValueError(f"dtype={dtype}: {str(file)!r} says by itself what it holds; leave dtype out")
    tokens = _mapped_npy(file) if file.suffix == ".npy" else _mapped_bin(file, dtype)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{str(file)!r} holds {tokens.dtype} of shape {tokens.shape}: write one line of whole numbers, "
            "such as numpy.save(path, tokens.astype(numpy.uint16))"
        )
    tokens = tokens if limit is None else tokens[: limit // tokens.itemsize]
    if tokens.dtype.kind == "i" and len(tokens) and tokens.min() < 0:
        raise ValueError(f"{str(file)!r} holds the token {tokens.min()}: tokens are 0 or more")
    return tokens


def _mapped_npy(file: Path) -> Tokens:
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{str(file)!r} can't be read as .npy ({error}): write it by numpy.save") from None
    return np.asarray(found)


def _mapped_bin(file: Path, dtype: str | None) -> Tokens:
    if dtype not in TOKEN_TYPES:
        given = "doesn't say what numbers it holds" if dtype is None else f"can't be read as dtype={dtype}"
        raise ValueError(f"{str(file)!r} {given}: write data.dtype as one of {', '.join(TOKEN_TYPES)}")
    size, each = file.stat().st_size, np.dtype(dtype).itemsize
    if size % each:
        raise ValueError(f"{str(file)!r} has {size} bytes, no whole number of {dtype}: write another dtype")
    return np.memmap(file, dtype=dtype, mode="r") if size else np.empty(0, dtype)


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
    except ImportError as error:
        raise ValueError(
            f"tokenizer={str(path)!r} needs the package `tokenizers`, which is not installed: "
            "run `pip install tokenizers`, or name no tokenizer for bytes"
        ) from error
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(
            f"tokenizer {str(path)!r} can't be read ({error}): name a tokenizer.json written by the "
            "Hugging Face package `tokenizers`"
        ) from error
    loaded.no_truncation()  # many files of models hold the length of a training sample
    loaded.no_padding()
    return loaded


def encode(text: bytes, tokenizer: Tokenizer) -> Tokens:
    """The tokens of a text. Bytes that are no UTF-8 become the replacement character first."""
    encoding = tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
    return np.array(encoding.ids, dtype=np.uint32)
