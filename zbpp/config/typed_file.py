"""A YAML file as a dataclass: every key known, every value of its type and within its range."""

from __future__ import annotations

import re
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
        return typed_as(kind, found, f"{path}: ")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def typed_as(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """Values as a `kind`, a dataclass of numbers, texts and dataclasses. Raises ConfigError.

    prefix: before a key of which an error speaks, such as "data.".
    """
    try:
        made: T = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(values)))  # type: ignore[assignment]
        return made
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf's own, for unknown and missing keys and for values of another type
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{prefix}{f'{key}: ' if key else ''}{in_python(str(error))}") from None


_KIND = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "bool": "true or false",
}


def in_python(text: str) -> str:
    """What OmegaConf says of a value of a wrong kind, and what to write."""
    kind = re.search(
        r"(?s)^Value (.*?) (?:of type '\w+' )?(?:could not be converted to|is not a valid) (\w+)", text
    )
    if kind and kind[2] in _KIND:
        return f"{kind[1]} is no value for it: write {_KIND[kind[2]]}"
    if "is not a ListConfig, list or tuple" in text:
        return "one value is no list: write [...], with commas between its values"
    if "is not Optional" in text:
        return "it can't be null: write a value, or leave it out"
    if "issing mandatory value" in text:
        return "no value is given, and it needs one"
    return text.partition("\n")[0]


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
