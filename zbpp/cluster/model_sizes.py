"""A transformer's sizes: from a node of configs/model, or from a Hugging Face config.json. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zbpp.ranges import ConfigError

_MOST = 10**7
_NODES = {"zbpp.models.gpt.Gpt": "gpt", "zbpp.models.llama.Llama": "llama"}
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # their layers are a Llama's, except for small vectors


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A causal transformer whose layers are alike.

    sequence: tokens. is_gated: the MLP has three matrices (SwiGLU) instead of two. has_biases: linear layers
    and norms have biases. is_tied: the head has the embedding's weight. positions: how many are learned.
    Raises ConfigError for sizes that are no whole numbers, and for kv_heads that do not divide heads.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    sequence: int
    is_gated: bool = True
    has_biases: bool = False
    is_tied: bool = False
    positions: int = 0

    def __post_init__(self) -> None:
        for each in fields(self)[:8]:
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
                raise ConfigError(f"model: {each.name}={value!r}: write a whole number, 1 to {_MOST:,}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model: {self.kv_heads} kv heads do not divide {self.heads} heads")

    @property
    def query(self) -> int:
        """The numbers in all queries of a token."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """The numbers in all keys of a token."""
        return self.kv_heads * self.head_size

    @property
    def layer_matrices(self) -> int:
        """The entries of a layer's matrices."""
        attention = self.hidden * (2 * self.query + 2 * self.kv)
        return attention + (3 if self.is_gated else 2) * self.hidden * self.intermediate

    @property
    def layer_vectors(self) -> int:
        """The entries of a layer's norms and biases."""
        if not self.has_biases:
            return 2 * self.hidden
        biases = self.query + 2 * self.kv + self.hidden + self.intermediate + self.hidden
        return 4 * self.hidden + biases

    @property
    def parameters(self) -> int:
        """All parameters."""
        layers = self.num_layers * (self.layer_matrices + self.layer_vectors)
        embedding = (self.vocab + self.positions) * self.hidden
        norm = self.hidden * (2 if self.has_biases else 1)
        return layers + embedding + norm + (0 if self.is_tied else self.vocab * self.hidden)


def sizes_of_node(node: Mapping[str, Any]) -> ModelSizes:
    """The sizes of a model node such as configs/model/llama_1b.yaml. Raises ConfigError."""
    kind = _NODES.get(str(node.get("_target_")))
    if kind is None:
        raise ConfigError(
            f"model: _target_={node.get('_target_')} has no sizes that --cluster knows: write one of "
            f"{', '.join(_NODES)}, or --model FOLDER with a config.json"
        )
    if node.get("experts") is not None:
        raise ConfigError("--cluster can't plan a model with experts: leave model.experts out")
    hidden, heads = _whole(node, "hidden_size"), _whole(node, "num_heads")
    if hidden % heads:
        raise ConfigError(f"model: num_heads={heads} does not divide hidden_size={hidden}")
    is_gpt, sequence = kind == "gpt", _whole(node, "sequence_length")
    given = node.get("intermediate_size")
    intermediate = 4 * hidden if is_gpt else -(-8 * hidden // 192) * 64 if given is None else given
    return ModelSizes(
        num_layers=_whole(node, "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if is_gpt or node.get("num_kv_heads") is None else _whole(node, "num_kv_heads"),
        head_size=hidden // heads,
        intermediate=intermediate,
        vocab=node.get("vocab_size", 256),
        sequence=sequence,
        is_gated=not is_gpt,
        has_biases=is_gpt,
        is_tied=bool(node.get("tie_embeddings")),
        positions=sequence if is_gpt else 0,
    )


def sizes_of_huggingface(config: Mapping[str, Any], sequence: int | None = None) -> ModelSizes:
    """The sizes in a config.json. sequence: tokens in a sequence; None: as many as the config allows.

    Raises ConfigError for a model_type that is not known, and for missing keys.
    """
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise ConfigError(
            f"config.json: model_type={kind} has layers that --cluster does not know: write one of "
            f"{', '.join(_FAMILIES)} (mixtures of experts are not counted)"
        )
    heads = _whole(config, "num_attention_heads")
    return ModelSizes(
        num_layers=_whole(config, "num_hidden_layers"),
        hidden=_whole(config, "hidden_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or _whole(config, "hidden_size") // heads,
        intermediate=_whole(config, "intermediate_size"),
        vocab=_whole(config, "vocab_size"),
        sequence=sequence or _whole(config, "max_position_embeddings"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def _whole(node: Mapping[str, Any], name: str) -> int:
    value = node.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: write a whole number, 1 or more")
    return value
