"""The data of a run from the config's node `data`."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from rich.progress import track
from torch.utils.data import default_collate

from zbpp.config import BatchingConfig, ConfigError, batching_of, instantiate_node, naming, without_batching
from zbpp.data import Data
from zbpp.data.loader import loaded_data
from zbpp.data.sequences import padded_rows, sequences_of
from zbpp.data.source import Unread
from zbpp.data.token_batches import TokenBatches
from zbpp.stage_api import TargetNames


def build_data(node: dict[str, Any], batch_size: int, seed: int, *, is_read: bool = True) -> Data:
    """The data that the node's `_target_` makes, see `loaded_data`.

    The target gets `seed` if it takes a seed and the node gives none. is_read: whether this rank has the
    first or the last stage. With data.batching=tokens a Dataset's rows may differ in length: they are filled
    up in a batch. Raises ConfigError.
    """
    extra: dict[str, Any] = {"batch_size": batch_size}
    if "seed" not in node:
        extra["seed"] = seed
    if str(node.get("_target_", "")).startswith("zbpp.data."):
        extra["is_read"] = is_read  # left out for a target that does not take it
    data = instantiate_node("data", without_batching(node), **extra)
    with naming(f"data ({node['_target_']})"):
        if not isinstance(data, Data):
            collate = padded_rows if batching_of(node).is_tokens else default_collate
            data = loaded_data(data, batch_size=batch_size, seed=seed, is_read=is_read, collate=collate)
    return data


def batched_by_tokens(
    data: Data,
    batching: BatchingConfig,
    *,
    keeps_apart: bool,
    is_shown: bool = False,
    names: TargetNames = MappingProxyType({}),
) -> Data:
    """The data with batches of about so many tokens to train on; held-out batches stay rows.

    keeps_apart: whether the model keeps documents of one row apart. is_shown: whether a bar shows the reading
    of lengths. names: see `with_target`. Raises ConfigError.
    """
    assert batching.tokens_per_batch is not None  # the config has checked it
    if batching.packing and not keeps_apart:
        raise ConfigError(
            "data.packing=true needs a model that keeps the documents of a row apart, and this one does not: "
            "write data.packing=null, which fills rows up instead"
        )
    facts: dict[str, Any] = {"items_per_batch": batching.tokens_per_batch, "is_shared": True}
    if isinstance(data.train, Unread):
        return data._replace(**facts)
    with naming("data"):
        sequences = sequences_of(data.train, _watch if is_shown else iter)
        train = TokenBatches(
            sequences,
            tokens_per_batch=batching.tokens_per_batch,
            is_packed=keeps_apart and batching.packing is not False,
            names=names,
        )
    note = (
        f"batches of {batching.tokens_per_batch:,} tokens or a few less: sequences of {sequences.mean:,.0f} "
        f"tokens on average, {sequences.longest:,} at most, "
        + ("several in a row" if train.is_packed else "a row each, filled up")
    )
    padding = 1 - train.mean_tokens / batching.tokens_per_batch
    return data._replace(train=train, padding=padding, unit="tokens", notes=(*data.notes, note), **facts)


def _watch(rows: range) -> Iterable[int]:
    """Show a bar in a terminal while rows are read."""
    return track(rows, "reading the lengths of the rows", transient=True)


def limit_evaluation(
    data: Data, evaluate_every: int, most_batches: int, num_parts: int, batch_size: int
) -> Data:
    """The data with at most `most_batches` held-out batches, of which the last one may be smaller.

    num_parts: how many replicas and shards see different data; each takes a batch of `data`, which has
    `batch_size` rows, and these batches count as one. Raises ConfigError if the run evaluates and nothing is
    held out.
    """
    num_batches = min(most_batches, data.num_evaluation_batches // num_parts)
    rest = (data.num_evaluation_batches - num_batches * num_parts) * batch_size + data.num_evaluation_rest
    num_rest = rest if num_batches < most_batches else 0
    if evaluate_every and not num_batches and not num_rest:
        raise ConfigError(
            "no data are held out, but evaluate_every > 0: write evaluate_every=0, or hold out some (of text "
            "or conversations: a larger data.held_out, such as 0.2)"
        )
    return data._replace(num_evaluation_batches=num_batches, num_evaluation_rest=num_rest)
