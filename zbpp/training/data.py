"""Text files -> tokens -> batches.

Everything here follows from the arguments and a step number: there is no state to save, and no
rank, so any number of ranks sees the same global batch, and a run resumes at any step.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zbpp.seeding import seed_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.NDArray[Any]
"""A line of tokens, any unsigned integer type."""

NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
STANDARD_LIBRARY_BYTES = 4 * 2**20  # a third of it: enough for a demo, read in 0.1 s


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
        """16 hex digits that two ranks share if and only if they read the same corpus, split alike."""
        shape = f"{self.tokens.dtype} {self.vocab_size} {self.num_held_out}".encode()
        digest = blake2b(shape, digest_size=8)
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()

    def unigram_entropy(self) -> float:
        """Nats per token: the loss of the best model that doesn't look at any context."""
        counts = np.bincount(self.tokens, minlength=self.vocab_size)
        frequencies = counts[counts > 0] / len(self.tokens)
        return float(-(frequencies * np.log(frequencies)).sum())


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    pattern: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
    held_out: float = 0.05,
) -> Corpus:
    """Read a file, or the files of a folder whose names match `pattern`, at any depth.

    `path` None: the sources of this machine's Python standard library, without tests and packages,
    4 MiB of them. `pattern` None: `*.py` there, `*.txt` in a folder of yours. A token is a byte,
    unless `tokenizer` names a Hugging Face `tokenizers` JSON file. `max_bytes`: where to stop
    reading. `held_out`: the share of tokens kept for evaluation, at the end.
    Raises FileNotFoundError if there is no such file, ValueError if there is nothing in it or an
    argument doesn't fit.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} is a share of the corpus: write 0.0 to 0.99")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} leaves nothing to read: write 1 or more, or None for all")
    encoder = None if tokenizer is None else load_tokenizer(Path(tokenizer))
    source, files = corpus_files(path, pattern)
    limit = STANDARD_LIBRARY_BYTES if path is None and max_bytes is None else max_bytes
    text = read_bytes(files, limit)
    tokens = np.frombuffer(text, dtype=np.uint8) if encoder is None else encode(text, encoder)
    if len(tokens) == 0:
        raise ValueError(f"the corpus {source} is empty: {len(files)} files, no text; name another data path")
    vocab_size = 256 if encoder is None else encoder.get_vocab_size()
    return Corpus(tokens, vocab_size, num_held_out=int(len(tokens) * held_out))


def corpus_files(path: str | os.PathLike[str] | None, pattern: str | None) -> tuple[Path, list[Path]]:
    """The folder or file that is meant, and the files to read from it."""
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

    The order is by hash, not by name: where reading stops early, and in the held-out end, there is
    then a sample of all files, not the last letters of the alphabet. Raises ValueError if none match.
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


def read_bytes(files: list[Path], limit: int | None) -> bytes:
    """The files' contents one after the other, cut at `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    for file in files:
        if limit is not None and size >= limit:
            break
        parts.append(file.read_bytes())
        size += len(parts[-1])
    return b"".join(parts)[:limit]


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises FileNotFoundError or ValueError, saying which of the two files or packages is at fault."""
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
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(
            f"tokenizer {str(path)!r} can't be read ({error}): name a tokenizer.json written by the "
            "Hugging Face package `tokenizers`"
        ) from error


def encode(text: bytes, tokenizer: Tokenizer) -> Tokens:
    """Token numbers of a text; bytes that are no UTF-8 become the replacement character."""
    encoding = tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
    return np.array(encoding.ids, dtype=np.uint32)


class Batches:
    """Batches of (inputs, targets) from a line of tokens, cut into windows that don't overlap.

    Each epoch takes every window once, in an order drawn from (seed, epoch); `seed` None: in the
    order of the text, for evaluation. The last tokens, if they don't fill a window, aren't used.
    `name` is how errors call the tokens. Raises ValueError if they don't fill one window.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int | None,
        name: str = "the corpus",
    ) -> None:
        check_at_least_one(sequence_length=sequence_length, batch_size=batch_size)
        if len(tokens) < sequence_length + 1:
            raise ValueError(
                f"sequence_length={sequence_length} needs {sequence_length + 1} tokens (each target is the "
                f"next one), but {name} has {len(tokens)}: write sequence_length={max(1, len(tokens) - 1)} "
                "or less, or give more text"
            )
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self._tokens = tokens
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def num_windows(self) -> int:
        """Samples per epoch."""
        return (len(self._tokens) - 1) // self.sequence_length

    @property
    def num_batches(self) -> int:
        """Full batches per epoch, but at least one: fewer windows than a batch are repeated in it."""
        return max(1, self.num_windows // self.batch_size)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `step` (from 0), int64 [batch_size, sequence_length] each.

        A target is the token after its input. A batch may reach into the next epoch.
        """
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        windows = np.array([self._window(sample) for sample in samples])
        positions = windows[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens = torch.from_numpy(self._tokens[positions].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.num_windows)
        return place if self.seed is None else int(self._epoch_order(self.seed, epoch)[place])

    def _epoch_order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        # Kept for one epoch only: steps come in order, and drawing it anew each time would be slow.
        if epoch != self._epoch:
            generator = np.random.default_rng(seed_of(seed, "epoch", epoch))
            self._epoch, self._order = epoch, generator.permutation(self.num_windows)
        return self._order


class RandomRegression:
    """Normal inputs and what a fixed random layer makes of them: data for `Mlp` and `Emulated`."""

    def __init__(self, *, in_features: int, out_features: int, batch_size: int, seed: int) -> None:
        check_at_least_one(in_features=in_features, out_features=out_features, batch_size=batch_size)
        self.batch_size = batch_size
        self.seed = seed
        self._first = 0
        self._teacher = draw(in_features, out_features, seed=seed_of(seed, "teacher")) / in_features**0.5

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs [batch_size, in_features] and targets [batch_size, out_features] in float32."""
        inputs = draw(
            self.batch_size, len(self._teacher), seed=seed_of(self.seed, "batch", self._first + step)
        )
        return inputs, torch.tanh(inputs @ self._teacher)

    def offset(self, num_steps: int) -> RandomRegression:
        """The same task from `num_steps` later on."""
        later = copy(self)
        later._first = self._first + num_steps
        return later


class Data(NamedTuple):
    """What a trainer reads: batches by step, and what else is worth knowing of them."""

    train: Batches | RandomRegression
    evaluation: Batches | RandomRegression
    num_evaluation_batches: int
    tokens_per_batch: int
    fingerprint: str  # the same on two ranks that read the same
    unigram_entropy: float | None = None  # nats per token


def text_data(
    *,
    sequence_length: int,
    vocab_size: int,
    batch_size: int,
    seed: int,
    path: str | None = None,
    pattern: str | None = None,
    tokenizer: str | None = None,
    max_bytes: int | None = None,
    held_out: float = 0.05,
) -> Data:
    """Batches from text; see `load_corpus`. Raises ValueError also if the model's vocabulary is too small."""
    corpus = load_corpus(path, pattern=pattern, tokenizer=tokenizer, max_bytes=max_bytes, held_out=held_out)
    if corpus.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {corpus.vocab_size} tokens, the model's vocab_size={vocab_size} is smaller: "
            f"write model.vocab_size={corpus.vocab_size}"
        )
    shape = {"sequence_length": sequence_length, "batch_size": batch_size}
    train = Batches(corpus.train, **shape, seed=seed, name="the corpus")
    evaluation = Batches(corpus.held_out, **shape, seed=None, name="the held-out part") if held_out else None
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=evaluation.num_batches if evaluation else 0,
        tokens_per_batch=batch_size * sequence_length,
        fingerprint=corpus.fingerprint,
        unigram_entropy=corpus.unigram_entropy(),
    )


def regression_data(*, in_features: int, out_features: int, batch_size: int, seed: int) -> Data:
    """Random regression; evaluation draws from the steps that training won't reach."""
    source = RandomRegression(
        in_features=in_features, out_features=out_features, batch_size=batch_size, seed=seed
    )
    return Data(
        source,
        source.offset(2**40),
        1,
        batch_size,
        fingerprint=f"regression {in_features} {out_features} {seed}",
    )


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers that only `seed` decides."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def check_at_least_one(**sizes: int) -> None:
    """Raises ValueError naming the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be positive: write 1 or more")
