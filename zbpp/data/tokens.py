"""Batches of prepared tokens, from one set or from several in fixed shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zbpp.data.encoding import fingerprint_of
from zbpp.data.mixture import Mixture, shares_in_block
from zbpp.data.prepared import BYTES, HELD_OUT, TRAIN, Prepared, digest_of, open_prepared
from zbpp.data.source import Data
from zbpp.data.text import Batches, check_fills_a_batch
from zbpp.data.windows import Samples, Windows
from zbpp.seeding import seed_of


def token_data(
    *,
    sequence_length: int,
    vocab_size: int,
    batch_size: int,
    seed: int,
    path: str | None = None,
    mixture: Sequence[Mapping[str, Any]] | None = None,
    across_documents: bool = True,
    tokenizer: str | None = None,
) -> Data:
    """Batches from a set that scripts/prepare_data.py wrote, `path`, or from several, `mixture`.

    mixture: entries with a `path` and a `weight`, its share of the samples up to a factor. across_documents:
    whether tokens see the documents before their own in a window; if not, batches are dicts with
    `position_ids`, and the model has to honour them. tokenizer: a file that the sets must have been made
    with. Raises FileNotFoundError; ValueError if tokenizers or vocabulary disagree, and for fewer samples
    than a batch.
    """
    paths, weights = _entries(path, mixture)
    sets = [open_prepared(each) for each in paths]
    _check_vocabulary(sets, vocab_size, tokenizer)

    def batches(part: str, seed: int | None) -> Batches:
        windows = [
            _windows(
                each,
                part,
                sequence_length,
                seed_of(seed, "set", number) if seed is not None else None,
                across_documents=across_documents,
            )
            for number, each in enumerate(sets)
        ]
        samples = windows[0] if len(sets) == 1 else Mixture(windows, weights, seed=seed)
        return Batches.from_samples(samples, batch_size)

    train = batches(TRAIN, seed)
    check_fills_a_batch(train, " and ".join(map(str, paths)))
    has_evaluation = all(each.header.parts[HELD_OUT].num_tokens for each in sets)
    evaluation = batches(HELD_OUT, None) if has_evaluation else None
    entropies = [each.header.unigram_entropy for each in sets]
    return Data(
        train=train,
        evaluation=evaluation or train,
        num_evaluation_batches=evaluation.num_batches if evaluation else 0,
        items_per_batch=batch_size * sequence_length,
        fingerprint=_fingerprint(sets, weights),
        unigram_entropy=entropies[0] if len(sets) == 1 else None,
    )


def _entries(path: str | None, mixture: Sequence[Mapping[str, Any]] | None) -> tuple[list[str], list[float]]:
    if (path is None) == (mixture is None):
        raise ValueError(
            "write data.path=FOLDER, or data.mixture=[{path: FOLDER, weight: 3}, {path: FOLDER, weight: 1}]"
        )
    if path is not None:
        return [path], [1.0]
    entries = mixture or []
    wrong = [dict(entry) for entry in entries if set(entry) != {"path", "weight"}]
    if wrong or not entries:
        raise ValueError(f"data.mixture has {wrong or 'no entry'}: write entries {{path: ..., weight: ...}}")
    weights = [entry["weight"] for entry in entries]
    shares_in_block(weights)  # raises ValueError for a bad weight, also for that of a single set
    return [str(entry["path"]) for entry in entries], weights


def _windows(
    prepared: Prepared, part: str, sequence_length: int, seed: int | None, *, across_documents: bool
) -> Samples:
    tokens, ends = prepared.part(part)
    return Windows(
        tokens,
        sequence_length=sequence_length,
        seed=seed,
        ends=None if across_documents else ends,
        name=f"{prepared.folder} ({part})",
    )


def _check_vocabulary(sets: Sequence[Prepared], vocab_size: int, tokenizer: str | None) -> None:
    """Raises ValueError if the sets' tokenizers differ, or from the given one, or vocab_size is too small."""
    first = sets[0]
    for other in sets[1:]:
        if other.header.tokenizer != first.header.tokenizer:
            raise ValueError(
                f"{first.folder} and {other.folder} were made by different tokenizers "
                f"({first.header.tokenizer}, {other.header.tokenizer}), so a number means another token in "
                "each: prepare one of them again"
            )
    if tokenizer is not None:
        given = fingerprint_of(Path(tokenizer).expanduser())
        if given != first.header.tokenizer:
            found = first.header.tokenizer
            holds = "bytes" if found == BYTES else f"tokens of another one ({found})"
            raise ValueError(
                f"{first.folder} was not made by data.tokenizer={tokenizer} ({given}), but holds {holds}: "
                "name the one that made it, or prepare the tokens again"
            )
    needed = max(each.header.vocab_size for each in sets)
    if needed > vocab_size:
        raise ValueError(
            f"the data has {needed} tokens, the model's vocab_size={vocab_size} is smaller: write "
            f"model.vocab_size={needed}"
        )


def _fingerprint(sets: Sequence[Prepared], weights: Sequence[float]) -> str:
    return digest_of(repr([(each.header.fingerprint, *weights) for each in sets]).encode())
