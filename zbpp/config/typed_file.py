"""A YAML file as a dataclass: every key known, every value of its type and within its range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from zbpp.ranges import ConfigError

T = TypeVar("T")


def read_typed(path: Path, kind: type[T]) -> T:
    """The file's values as a `kind`, a dataclass of numbers, texts and dataclasses. Raises ConfigError."""
    found = read_plain(path)
    try:
        return typed_as(kind, found, str(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def typed_as(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    """Values as a `kind`, a dataclass of numbers, texts and dataclasses. Raises ConfigError.

    name: of what holds the values, for a key or a type that is wrong.
    """
    try:
        made: T = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(values)))  # type: ignore[assignment]
        return made
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf's own, for unknown and missing keys and for values of another type
        raise ConfigError(f"{name}: {str(error).partition(chr(10))[0]}{_key_in(error)}") from None


def _key_in(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    return f" ({key})" if key else ""


def read_plain(path: Path) -> dict[str, Any]:
    """A YAML file's keys and values. Interpolations stay as they are. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file")
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # OmegaConf lets errors of YAML and of the file system through
        raise ConfigError(f"{path} can't be read ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has no keys: write lines such as nodes: 2")
    return {str(name): value for name, value in found.items()}
