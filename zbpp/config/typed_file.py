"""A YAML file as a dataclass: every key known, every value of its type and within its range."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import OmegaConf

from zbpp.ranges import ConfigError

T = TypeVar("T")


def read_typed(path: Path, kind: type[T]) -> T:
    """The file's values as a `kind`, a dataclass of numbers, texts and dataclasses. Raises ConfigError."""
    found = read_plain(path)
    try:
        return _made(found, kind, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


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


def _made(given: Any, kind: type[T], prefix: str) -> T:
    if not isinstance(given, dict):
        raise ConfigError(f"{prefix.rstrip('.')}={given}: write the keys {', '.join(_names(kind))} under it")
    for name in given:
        if name not in _names(kind):
            near = difflib.get_close_matches(str(name), _names(kind), n=1)
            meant = f"; did you mean {prefix}{near[0]}?" if near else f": write {', '.join(_names(kind))}"
            raise ConfigError(f"{prefix}{name}: there is no such key{meant}")
    hints = get_type_hints(kind)
    values = {}
    for each in fields(kind):  # type: ignore[arg-type]  # T is a dataclass
        if each.name in given:
            values[each.name] = _value(given[each.name], hints[each.name], prefix + each.name, each)
        elif each.default is MISSING:
            raise ConfigError(f"{prefix}{each.name} is missing: {_advice(each, hints[each.name])}")
    return kind(**values)


def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def _value(given: Any, kind: Any, key: str, declared: Field[Any]) -> Any:
    if is_dataclass(kind):
        return _made(given, kind, f"{key}.")  # type: ignore[arg-type]  # a class, no instance
    if kind is str:
        return str(given)
    is_number = isinstance(given, int if kind is int else int | float) and not isinstance(given, bool)
    if not is_number:
        raise ConfigError(
            f"{key}={given!r} is no {'whole ' * (kind is int)}number: {_advice(declared, kind)}"
        )
    try:
        return kind(given)
    except OverflowError:
        raise ConfigError(f"{key} is too large: {_advice(declared, kind)}") from None


def _advice(declared: Field[Any], kind: Any) -> str:
    if is_dataclass(kind):
        return f"write {declared.name}: with the keys {', '.join(_names(kind))}"
    rule = declared.metadata.get("rule")
    return str(rule.advice(kind())) if rule is not None else "write a number"
