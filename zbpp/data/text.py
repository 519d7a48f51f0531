"""Batches of text, read when a run starts: bytes, or tokens of a tokenizer; or files of tokens, mapped."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zbpp.data.prepared import digest_of
from zbpp.data.sequences import Sequences, Watch
from zbpp.data.source import Data, check_at_least_one, check_share, check_vocab_size, unread_data
from zbpp.data.tokenizer import load_tokenizer
from zbpp.data.windows import Samples, Tokens, Windows
from zbpp.seeding import seed_of

NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
TOKEN_TYPES = ("uint16", "uint32", "int32", "int64", "uint8")
STANDARD_LIBRARY_BYTES = 4 * 2**20  # about a third of its sources: enough for a demo, read in 0.1 s


class Batches:
    """Batches of samples by number: (inputs, targets), see `batch`."""

    def __init__(self, samples: Samples, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    @property
    def num_batches(self) -> int:
        """Full batches per epoch, but at least one: fewer samples than a batch are repeated in it."""
        return max(1, self.samples.num_samples // self.batch_size)

    def batch(self, step: int) -> Any:
        """Inputs and targets of `step` (from 0), int64 [batch_size, sequence_length] each.

        A target is the token after its input. A batch may reach into the next epoch. If documents are told
        apart, the batch is a dict of input_ids, position_ids (from 0 in each document) and target.
        """
        first = step * self.batch_size
        tokens, positions = self.samples.rows(np.arange(first, first + self.batch_size))
        inputs, targets = (
            torch.from_numpy(np.ascontiguousarray(each)) for each in (tokens[:, :-1], tokens[:, 1:])
        )
        if positions is None:
            return inputs, targets
        return {"input_ids": inputs, "position_ids": torch.from_numpy(positions), "target": targets}

    def sequences(self, watch: Watch) -> Sequences:
        """The documents, in pieces of at most a window; the windows if documents are not told apart."""
        return self.samples.sequences()


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
    """Batches from a text file, the files below a folder whose names match `pattern`, or a file of tokens.

    path: None: 4 MiB of the sources of this machine's Python standard library, without tests and packages.
    pattern: None: `*.py` there, `*.txt` in a folder of yours. A token is a byte, unless `tokenizer` names a
    tokenizer.json. A `.npy` file holds a sequence of tokens, a `.bin` file raw numbers of type `dtype`
    ("uint16"); both are mapped, not loaded. vocab_size: of the model. max_bytes: where to stop reading.
    held_out: the share of tokens kept for evaluation, at the end. is_read: False on a rank that will ask for
    no batch: nothing is loaded there. Raises FileNotFoundError if there is no such file, ValueError for a
    binary file and for what does not fit.
    """
    if not is_read:
        return unread_data(batch_size * sequence_length)
    check_share(held_out)
    tokens, needed = load_tokens(path, pattern, tokenizer, dtype, max_bytes)
    check_vocab_size(needed, vocab_size)
    num_held_out = int(len(tokens) * held_out)
    num_train = len(tokens) - num_held_out
    evaluation = None
    if held_out:
        rest = tokens[num_train:]
        evaluation = Windows(rest, sequence_length=sequence_length, seed=None, name="the held-out part")
    shape = f"{tokens.dtype} {needed} {num_held_out}".encode()
    return data_of_samples(
        Windows(tokens[:num_train], sequence_length=sequence_length, seed=seed),
        evaluation,
        sequence_length=sequence_length,
        batch_size=batch_size,
        fingerprint=digest_of(shape, np.ascontiguousarray(tokens).data),
    )


def data_of_samples(
    train: Samples,
    evaluation: Samples | None,
    *,
    sequence_length: int,
    batch_size: int,
    fingerprint: str,
    name: str = "the corpus",
) -> Data:
    """`Data` of samples of tokens. Raises ValueError for fewer than a batch: it would hold a text twice."""
    check_at_least_one(batch_size=batch_size)
    if train.num_samples < batch_size:
        raise ValueError(
            f"{name} has {train.num_samples} windows of sequence_length tokens, and a batch takes "
            f"{batch_size}: give more text, or write a smaller microbatch_size, num_microbatches or "
            "model.sequence_length"
        )
    batches = Batches(train, batch_size)
    held_out = None if evaluation is None else Batches(evaluation, batch_size)
    num_held_out = 0 if evaluation is None else evaluation.num_samples
    return Data(
        train=batches,
        evaluation=held_out or batches,
        num_evaluation_batches=num_held_out // batch_size,
        items_per_batch=batch_size * sequence_length,
        fingerprint=fingerprint,
        num_evaluation_rest=num_held_out % batch_size,
    )


def load_tokens(
    path: str | None = None,
    pattern: str | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    max_bytes: int | None = None,
) -> tuple[Tokens, int]:
    """(tokens, the size of their vocabulary). Arguments and errors: see `text_data`."""
    source, files = corpus_files(path, pattern)
    limit = STANDARD_LIBRARY_BYTES if path is None and max_bytes is None else max_bytes
    if source.suffix in (".npy", ".bin") and source.is_file():
        if tokenizer is not None:
            raise ValueError(f"{str(source)!r} holds tokens already: leave tokenizer out")
        tokens = map_tokens(source, dtype, limit)
        vocab_size = int(tokens.max(initial=0)) + 1
    elif tokenizer is None:
        tokens, vocab_size = np.frombuffer(read_text(files, limit), dtype=np.uint8), 256
    else:
        encoder = load_tokenizer(Path(tokenizer))
        text = read_text(files, limit).decode("utf-8", errors="replace")
        tokens = np.array(encoder.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        vocab_size = encoder.get_vocab_size()
    if len(tokens) == 0:
        raise ValueError(f"the corpus {source} is empty: {len(files)} files, no text; name another data path")
    return tokens, vocab_size


def corpus_files(path: str | None, pattern: str | None) -> tuple[Path, list[Path]]:
    """(the folder or file that `path` names, the files to read from it)."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        return library, find_files(library, pattern or "*.py", skip=NOT_SOURCES)
    source = Path(path).expanduser()
    if not source.exists():
        raise FileNotFoundError(
            f"data path {str(source)!r} does not exist (looked from {Path.cwd()}): name a file or a folder"
        )
    return source, [source] if source.is_file() else find_files(source, pattern or "*.txt")


def find_files(folder: Path, pattern: str, skip: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `folder` whose names match, in an order that only their relative paths decide.

    The order is by hash, not by name. So what is read if reading stops early, and what is held out at the
    end, are samples of all files, not the first or last letters of the alphabet. Folders in `skip` are left
    out. Raises ValueError if no name matches.
    """
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip]  # these are not entered
        names += [Path(parent, name).relative_to(folder).as_posix() for name in files]
    matching = [name for name in names if fnmatch(os.path.basename(name), pattern)]
    if not matching:
        kinds = Counter(f"*{os.path.splitext(name)[1]}" for name in names).most_common(4)
        held = ", ".join(f"{count} of {kind}" for kind, count in kinds) or "no file at all"
        raise ValueError(f"no file in {str(folder)!r} matches pattern={pattern!r}: it holds {held}")
    return [folder / name for name in sorted(matching, key=seed_of)]


def read_text(files: list[Path], limit: int | None) -> bytes:
    """The files' contents one after the other, cut at `limit` bytes. Raises ValueError for binary files."""
    parts: list[bytes] = []
    size = 0
    for file in files:
        if limit is not None and size >= limit:
            break
        check_text(file)
        parts.append(file.read_bytes())
        size += len(parts[-1])
    return b"".join(parts)[:limit]


def check_text(file: Path) -> None:
    """Raises ValueError for a binary file, which would be trained on as if it were text."""
    with file.open("rb") as opened:
        if b"\0" in opened.read(2**16):
            raise ValueError(
                f"{str(file)!r} is no text: it holds NUL bytes, as binary, compressed and UTF-16 files do; "
                "write it as UTF-8 text, or as tokens: a .npy file, or a .bin file with dtype=uint16"
            )


def map_tokens(file: Path, dtype: str | None, limit: int | None) -> Tokens:
    """The tokens of a .npy or .bin file, cut at `limit` bytes. Raises ValueError, saying what it holds."""
    if file.suffix == ".npy":
        tokens = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    elif dtype in TOKEN_TYPES:
        tokens = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
    else:
        raise ValueError(
            f"{str(file)!r} doesn't say what numbers it holds: write data.dtype as one of "
            f"{', '.join(TOKEN_TYPES)}"
        )
    tokens = tokens if limit is None else tokens[: limit // tokens.itemsize]
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min(initial=0) < 0:
        raise ValueError(
            f"{str(file)!r} holds {tokens.dtype} of shape {tokens.shape}: write one line of whole numbers "
            "from 0, such as numpy.save(path, tokens.astype(numpy.uint16))"
        )
    return tokens
