"""The data of a run from the config's node `data`."""

from __future__ import annotations

from typing import Any

from zbpp.config import ConfigError, instantiate_node, naming
from zbpp.data import Data
from zbpp.data.loader import loaded_data


def build_data(node: dict[str, Any], batch_size: int, seed: int, *, is_read: bool = True) -> Data:
    """The data that the node's `_target_` makes, see `loaded_data`.

    The target gets `seed` if it takes a seed and the node gives none. is_read: whether this rank has the
    first or the last stage. Raises ConfigError.
    """
    extra: dict[str, Any] = {"batch_size": batch_size}
    if "seed" not in node:
        extra["seed"] = seed
    if str(node.get("_target_", "")).startswith("zbpp.data."):
        extra["is_read"] = is_read  # left out for a target that does not take it
    data = instantiate_node("data", node, **extra)
    with naming(f"data ({node['_target_']})"):
        if not isinstance(data, Data):
            data = loaded_data(data, batch_size=batch_size, seed=seed, is_read=is_read)
    return data


def limit_evaluation(data: Data, evaluate_every: int, most_batches: int, num_parts: int) -> Data:
    """The data with at most `most_batches` held-out batches.

    num_parts: how many replicas and shards see different data; each takes a batch of `data`, and these
    batches count as one. Raises ConfigError if the run evaluates and no whole batch is held out.
    """
    num_batches = min(most_batches, data.num_evaluation_batches // num_parts)
    if evaluate_every and not num_batches:
        is_chat = hasattr(data.train, "num_conversations")  # a row is a conversation
        size = data.train.batch_size if is_chat else data.items_per_batch  # type: ignore[attr-defined]
        batch = f"{size * num_parts} {'conversations' if is_chat else data.unit}"
        raise ConfigError(
            f"less data is held out than a batch ({batch}), but evaluate_every > 0: write evaluate_every=0, "
            "or hold out more (of text or conversations: a larger data.held_out, such as 0.2)"
        )
    return data._replace(
        train=_for_parts(data.train, num_parts),
        evaluation=_for_parts(data.evaluation, num_parts),
        num_evaluation_batches=num_batches,
    )


def _for_parts(source: Any, num_parts: int) -> Any:
    """The source, told how many parts a step's data have, if it asks for that (see zbpp/data/chat.py)."""
    return source.for_parts(num_parts) if hasattr(source, "for_parts") else source
