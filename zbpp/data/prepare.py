"""Makes prepared tokens from text. Hugging Face's `datasets` reads and tokenizes, in several processes.

    sources --load_dataset--> rows --map--> tokens in Arrow files --> train.bin, held_out.bin, prepared.json

All files are made in OUTPUT.partial, which gets its final name when it is whole. `datasets` keeps in it what
is done, so a call that was cut short goes on when it is repeated. The result depends on the sources and the
settings, not on the number of processes. Needs the extra `hf`.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zbpp.data.prepared import (
    BYTES,
    HELD_OUT,
    PARTS,
    TOKENIZER,
    TRAIN,
    Header,
    PartHeader,
    checksum_of,
    digest_of,
    documents_file,
    tokens_file,
    write_header,
)
from zbpp.data.source import check_share
from zbpp.data.text import check_text, find_files
from zbpp.data.tokenizer import fingerprint_of, load_tokenizer
from zbpp.data.windows import Tokens
from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The loader of `datasets` for a file's name; all other files are text.
_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_ROWS = 100  # rows in the memory of one process


class Reading(NamedTuple):
    """How documents are read.

    field: the column with the text, of all but text files. split: of a folder that `datasets.save_to_disk`
    wrote with several. pattern: of the names to take from a folder of files. separator: the text between two
    documents of a file or row; None: it is one document.
    """

    field: str = "text"
    split: str | None = None
    pattern: str = "*.txt"
    separator: str | None = None


class Encoder(NamedTuple):
    """How documents become tokens.

    tokenizer: None: a token is a byte. end_token: the token after each document; None: there is none.
    fingerprint: see `Header.tokenizer`.
    """

    tokenizer: Tokenizer | None
    end_token: int | None
    vocab_size: int
    fingerprint: str

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest type of a file that holds all tokens."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(self, documents: Sequence[str]) -> list[Tokens]:
        """The tokens of each document, with the end token."""
        found: list[Any]
        if self.tokenizer is None:
            found = [np.frombuffer(each.encode(errors="replace"), dtype=np.uint8) for each in documents]
        else:
            encodings = self.tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
            found = [each.ids for each in encodings]
        end = [] if self.end_token is None else [self.end_token]
        return [np.concatenate([each, end]).astype(self.dtype) for each in found]


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
        special = ", ".join(token.content for token in loaded.get_added_tokens_decoder().values())
        raise ValueError(
            f"tokenizer {str(tokenizer)!r} has no token {end_token!r}; special tokens: {special or 'none'}"
        )
    # Numbers may have gaps: the largest one decides how many rows an embedding needs.
    vocab_size = max(loaded.get_vocab(with_added_tokens=True).values()) + 1
    return Encoder(loaded, number, vocab_size, fingerprint_of(tokenizer))


def prepare(
    sources: Sequence[Path],
    output: Path,
    *,
    reading: Reading | None = None,
    tokenizer: Path | None = None,
    end_token: str | None = None,
    held_out: float = 0.05,
    processes: int = 1,
    overwrite: bool = False,
) -> Header:
    """Make the prepared set `output` from text, json, parquet and csv files, folders, and saved datasets.

    tokenizer, end_token: see `make_encoder`. held_out: the share of documents for evaluation, drawn by a hash
    of their places. Raises FileNotFoundError or ValueError, and leaves `output` as it was.
    """
    check_share(held_out)
    if output.exists() and not overwrite:
        raise ValueError(f"{str(output)!r} exists: name another folder, or write --overwrite")
    reading, encoder = reading or Reading(), make_encoder(tokenizer, end_token)
    work = output.with_name(f"{output.name}.partial")
    cache = work / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    tokens = _tokenized(sources, reading, encoder, held_out, cache, processes)
    header = _written(tokens, work, encoder)
    for name, part in header.parts.items():
        if not part.num_documents and (name == TRAIN or held_out):
            raise ValueError(
                f"--held-out {held_out} leaves no document for {name}: give more text, hold out another "
                "share (0: none), or cut the files into documents by --separator"
            )
    if tokenizer is not None:
        shutil.copyfile(tokenizer, work / TOKENIZER)
    write_header(work, header)
    shutil.rmtree(cache)
    if output.exists():
        shutil.rmtree(output)
    work.rename(output)
    return header


# ---------------------------------------------------------------- text to tokens


def _tokenized(
    sources: Sequence[Path], reading: Reading, encoder: Encoder, held_out: float, cache: Path, processes: int
) -> Any:
    """A `datasets.Dataset` of the documents' tokens, and whether a document is held out."""
    try:
        from datasets import Features, LargeList, Value, concatenate_datasets
    except ImportError as error:
        raise ValueError("prepared tokens need the package `datasets`: run `pip install zbpp[hf]`") from error
    features = Features({"tokens": LargeList(Value(encoder.dtype.name)), "is_held_out": Value("bool")})
    found = []
    for number, dataset in enumerate(_datasets(sources, reading, cache)):
        # The name says what the file depends on: `datasets` takes an existing file as it is.
        name = digest_of(repr((dataset._fingerprint, number, reading, encoder[1:], held_out)).encode())
        tokens = dataset.map(
            partial(encode_rows, number, reading.separator, encoder, held_out),
            batched=True,
            batch_size=_ROWS,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=features,
            writer_batch_size=_ROWS,
            cache_file_name=str(cache / f"tokens-{name}.arrow"),
            num_proc=min(processes, len(dataset)) if processes > 1 and len(dataset) > 1 else None,
            desc="Tokenizing",
        )
        found.append(tokens)
    return concatenate_datasets(found)


def _datasets(sources: Sequence[Path], reading: Reading, cache: Path) -> Iterator[Any]:
    """A `datasets.Dataset` with one column of text for each kind of files in each source.

    Raises FileNotFoundError for a source that is not there; ValueError for one without text.
    """
    from datasets import DatasetDict, Value, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    for source in (each.expanduser() for each in sources):
        found = []
        if (source / "state.json").exists() or (source / "dataset_dict.json").exists():
            saved = load_from_disk(source)
            if isinstance(saved, DatasetDict):
                if reading.split not in saved:
                    raise ValueError(f"{str(source)!r}: write --split with one of {', '.join(saved)}")
                saved = saved[reading.split]
            found.append((saved, reading.field))
        for kind, files in {} if found else _files_by_kind(source, reading.pattern).items():
            options = {"sample_by": "document", "encoding_errors": "replace"} if kind == "text" else {}
            try:
                loaded = load_dataset(kind, data_files=files, split="train", cache_dir=str(cache), **options)
            except DatasetGenerationError as error:
                raise ValueError(f"{str(source)!r} can't be read: {error.__cause__ or error}") from error
            found.append((loaded, "text" if kind == "text" else reading.field))
        for dataset, column in found:
            feature = dataset.features.get(column)
            if not isinstance(feature, Value) or "string" not in feature.dtype:
                raise ValueError(
                    f"{str(source)!r} has no text in a column {column!r}: write --field with one of "
                    f"{', '.join(dataset.column_names)}"
                )
            yield dataset.select_columns([column])


def _files_by_kind(source: Path, pattern: str) -> dict[str, list[str]]:
    """{loader of `datasets`: its files}."""
    if not source.exists():
        raise FileNotFoundError(
            f"{str(source)!r} does not exist (looked from {Path.cwd()}): name a file of text, json, parquet "
            "or csv, a folder of them, or a folder that datasets.save_to_disk wrote"
        )
    found: dict[str, list[str]] = {}
    for file in [source] if source.is_file() else find_files(source, pattern):
        kind = next((_LOADERS[suffix] for suffix in file.suffixes if suffix in _LOADERS), "text")
        if kind == "text":
            check_text(file)
        if file.stat().st_size:
            # A name may hold characters of a pattern, such as [1].
            found.setdefault(kind, []).append(glob.escape(str(file.absolute())))
    if not found:
        raise ValueError(f"{str(source)!r} holds no text")
    return found


def encode_rows(
    source: int,
    separator: str | None,
    encoder: Encoder,
    held_out: float,
    rows: dict[str, list[str | None]],
    indices: Sequence[int],
) -> dict[str, list[Any]]:
    """The tokens of all documents in some rows, without empty documents. indices: the rows' numbers."""
    (texts,) = rows.values()
    documents, parts = [], []
    for index, text in zip(indices, texts, strict=True):
        for place, document in enumerate((text or "").split(separator) if separator else [text]):
            if document:
                documents.append(document)
                parts.append(is_held_out(source, index, place, held_out))
    return {"tokens": encoder.encode(documents), "is_held_out": parts}


def is_held_out(source: int, row: int, place: int, share: float) -> bool:
    """Whether a document is for evaluation. A hash decides, so they come from the whole text."""
    return seed_of("held out", source, row, place) < share * 2**63


# ---------------------------------------------------------------- tokens to files


def _written(tokens: Any, folder: Path, encoder: Encoder) -> Header:
    """Write the tokens and the ends of the documents of both parts; returns the header."""
    if not len(tokens):
        raise ValueError("the sources hold no text")
    lengths: dict[str, list[Tokens]] = {part: [] for part in PARTS}
    with ExitStack() as stack:
        files = {part: stack.enter_context(tokens_file(folder, part).open("wb")) for part in PARTS}
        for table in tokens.with_format("arrow").iter(batch_size=_ROWS):
            is_held_out = table["is_held_out"].to_numpy()
            for part, is_chosen in ((TRAIN, ~is_held_out), (HELD_OUT, is_held_out)):
                documents = table.filter(is_chosen)["tokens"].combine_chunks()
                found = documents.flatten().to_numpy()
                files[part].write(found.astype(encoder.dtype.newbyteorder("<"), copy=False).data)
                lengths[part].append(documents.value_lengths().to_numpy())
    return Header(
        dtype=encoder.dtype.name,
        vocab_size=encoder.vocab_size,
        tokenizer=encoder.fingerprint,
        end_token=encoder.end_token,
        parts={part: _part(folder, part, lengths[part]) for part in PARTS},
    )


def _part(folder: Path, part: str, lengths: Sequence[Tokens]) -> PartHeader:
    ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    ends.astype("<i8").tofile(documents_file(folder, part))
    checksum = checksum_of(tokens_file(folder, part))
    return PartHeader(
        num_tokens=int(ends[-1]) if len(ends) else 0, num_documents=len(ends), checksum=checksum
    )
