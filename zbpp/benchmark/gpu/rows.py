"""Rows: what a part has found; and what became of the part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from zbpp.benchmark.gpu.settings import Settings


@dataclass(frozen=True)
class Row:
    """One row of a part's table.

    values: {column: number}. form: how they are written. mark: the name of the mark that the first value is
    compared with, see marks.py; noise: how much of the value may be measuring error. note: after the values.
    """

    what: str
    values: dict[str, float] = field(default_factory=dict)
    form: str = ".2f"
    mark: str | None = None
    noise: float = 0.0
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row as a dict."""
        return asdict(self)


class Part(Protocol):
    """The module of a part. It yields each row as soon as the row is known, since a part may be stopped."""

    def rows(self, settings: Settings) -> Iterator[Row]: ...


@dataclass
class Outcome:
    """What became of a part. why: why it was cut short or did not begin; "" if it ended well."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    why: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The outcome as a dict."""
        return asdict(self)
