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
