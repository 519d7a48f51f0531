"""What a config's fields accept and mean: declared beside each field, checked in one place.

    steps: int = ranged(100, least=1, help="optimizer steps")
    dtype: str = one_of("float32", "float64")
    run_dir: str = filled("runs", "write a folder")
    save_weights: bool = described(True, "at the end")

A number without a declaration is refused below 0. No number may be infinite or NaN.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol


class ConfigError(ValueError):
    """A config that can't be run; the message says what to write instead."""


class _Rule(Protocol):
    def accepts(self, value: Any) -> bool: ...
    def advice(self, value: Any) -> str: ...


@dataclass(frozen=True, kw_only=True)
class _Range:
    least: float = 0
    above: float | None = None  # instead of least
    most: float | None = None
    below: float | None = None  # instead of most
    unit: str = ""

    def accepts(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        is_large_enough = value > self.above if self.above is not None else value >= self.least
        is_too_large = (self.most is not None and value > self.most) or (
            self.below is not None and value >= self.below
        )
        return is_large_enough and not is_too_large

    def advice(self, value: float) -> str:
        noun = self.unit or ("a whole number" if isinstance(value, int) else "a number")
        return f"write {noun}, {self._bounds()}"

    def _bounds(self) -> str:
        lower = f"above {self.above:g}" if self.above is not None else f"{self.least:g} or more"
        if self.below is not None:
            return f"{lower}, below {self.below:g}"
        if self.most is None:
            return lower
        return (
            f"{lower}, at most {self.most:g}"
            if self.above is not None
            else f"{self.least:g} to {self.most:g}"
        )


@dataclass(frozen=True)
class _OneOf:
    choices: tuple[str, ...]

    def accepts(self, value: Any) -> bool:
        return value in self.choices

    def advice(self, value: Any) -> str:
        return f"write {', '.join(self.choices[:-1])} or {self.choices[-1]}"


@dataclass(frozen=True)
class _Filled:
    what_to_write: str

    def accepts(self, value: Any) -> bool:
        return bool(value.strip())

    def advice(self, value: Any) -> str:
        return self.what_to_write


def ranged(default: float | None, *, help: str = "", **bounds: Any) -> Any:
    """A field for a number within bounds: least (0) or above, most or below; unit: a noun for the message."""
    return field(default=default, metadata={"rule": _Range(**bounds), "help": help})


def one_of(*choices: str, help: str = "") -> Any:
    """A field for one of several words; the first is the default."""
    return field(default=choices[0], metadata={"rule": _OneOf(choices), "help": help})


def filled(default: str, advice: str, *, help: str = "") -> Any:
    """A field for a text that is not empty; advice: what the message tells to write."""
    return field(default=default, metadata={"rule": _Filled(advice), "help": help})


def described(default: Any, help: str) -> Any:
    """A field for any value of its type, with its line of help. A number may not be negative."""
    return field(default=default, metadata={"help": help})


def help_of(declared: Field[Any]) -> str:
    """A field's line of help: its words or its range, then what it means."""
    rule = declared.metadata.get("rule")
    words = ", ".join(rule.choices) if isinstance(rule, _OneOf) else ""
    return "; ".join(filter(None, [words, declared.metadata.get("help", "")]))


class Checked:
    """Base of a config dataclass: making one raises ConfigError for the first value out of range."""

    prefix: ClassVar[str] = ""  # of the keys in messages

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            self._check(each)

    def _check(self, declared: Field[Any]) -> None:
        value = getattr(self, declared.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        rule: _Rule | None = declared.metadata.get("rule", _Range() if is_number else None)
        if value is None or rule is None or rule.accepts(value):
            return
        or_null = ", or null" if "None" in str(declared.type) else ""
        raise ConfigError(f"{self.prefix}{declared.name}={value}: {rule.advice(value)}{or_null}")
