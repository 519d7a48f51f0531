"""How sequences become batches: the keys of the config's node `data` that its class does not get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from zbpp.config.typed_file import typed_as
from zbpp.ranges import Checked, ConfigError, described, one_of, ranged


@dataclass(kw_only=True)
class BatchingConfig(Checked):
    """How sequences become batches; keys of the node `data` that its class does not get."""

    prefix: ClassVar[str] = "data."
    batching: str = one_of(
        "rows", "tokens", help="tokens: batches of sequences that have about tokens_per_batch tokens"
    )
    tokens_per_batch: int | None = ranged(None, least=1, help="of a whole step, all replicas together")
    packing: bool | None = described(None, "sequences share a row; null: if the model keeps them apart")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_tokens and self.tokens_per_batch is None:
            raise ConfigError(
                "data.batching=tokens needs a number of tokens: write data.tokens_per_batch=16384, say"
            )
        given = {name: getattr(self, name) for name in ("tokens_per_batch", "packing")}
        for name, value in given.items():
            if not self.is_tokens and value is not None:
                raise ConfigError(f"data.{name}={value} is for batches of tokens: write data.batching=tokens")

    @property
    def is_tokens(self) -> bool:
        """Whether a batch is made by its number of tokens."""
        return self.batching == "tokens"


_NAMES = tuple(each.name for each in fields(BatchingConfig))


def batching_of(data: Any) -> BatchingConfig:
    """How the sequences of a node `data` become batches. Raises ConfigError."""
    given = {name: data[name] for name in _NAMES if isinstance(data, Mapping) and name in data}
    return typed_as(BatchingConfig, given, "data.")


def without_batching(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a node `data` that its class gets."""
    return {name: value for name, value in data.items() if name not in _NAMES}


def refuse_tokens(data: Any, command: str) -> None:
    """Raise ConfigError if a node `data` asks for batches of tokens, which the command does not make."""
    if batching_of(data).is_tokens:
        raise ConfigError(
            f"data.batching=tokens is for zbpp train: leave data.batching, data.tokens_per_batch and "
            f"data.packing out for {command}"
        )
