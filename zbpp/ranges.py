"""What a config's fields accept: declared beside each field, checked in one place.

    steps: int = ranged(100, least=1)
    dtype: str = one_of("float32", "float64")

A number without a declaration is refused below 0. No number may be infinite or NaN.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol


class ConfigError(ValueError):
    """A config that can't be run; the message says what to write instead."""


class _Accepts(Protocol):
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
        over = value > self.above if self.above is not None else value >= self.least
        under = (self.most is None or value <= self.most) and (self.below is None or value < self.below)
        return over and under

    def advice(self, value: float) -> str:
        noun = self.unit or ("a whole number" if isinstance(value, int) else "a number")
        bounds = f"above {self.above:g}" if self.above is not None else f"{self.least:g} or more"
        if self.below is not None:
            bounds += f", below {self.below:g}"
        elif self.most is not None:
            bounds = (
                f"{self.least:g} to {self.most:g}"
                if self.above is None
                else f"{bounds}, at most {self.most:g}"
            )
        return f"write {noun}, {bounds}"


@dataclass(frozen=True)
class _OneOf:
    choices: tuple[str, ...]

    def accepts(self, value: Any) -> bool:
        return value in self.choices

    def advice(self, value: Any) -> str:
        return f"write {', '.join(self.choices[:-1])} or {self.choices[-1]}"


def ranged(default: float | None, **bounds: Any) -> Any:
    """A field for a number within bounds: least (0) or above, most or below; unit: a noun for the message."""
    return field(default=default, metadata={"accepts": _Range(**bounds)})


def one_of(*choices: str) -> Any:
    """A field for one of several words; the first is the default."""
    return field(default=choices[0], metadata={"accepts": _OneOf(choices)})


class Checked:
    """Base of a config dataclass: making one raises ConfigError for the first value out of range."""

    prefix: ClassVar[str] = ""  # of the keys in messages

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            self._check(each)

    def _check(self, each: Field[Any]) -> None:
        value = getattr(self, each.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        rule: _Accepts | None = each.metadata.get("accepts", _Range() if is_number else None)
        if value is None or rule is None or rule.accepts(value):
            return
        or_null = ", or null" if "None" in str(each.type) else ""
        raise ConfigError(f"{self.prefix}{each.name}={value}: {rule.advice(value)}{or_null}")
