"""What a parity check has found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

_SHOWN = 10  # rows of the table


@dataclass
class Row:
    """The worst comparison of one parameter, or of the losses or the norm.

    check: what was compared, such as "gradient of step 0". error: the largest difference, relative to the
    largest expected number. cause: the known mistake that explains the difference; "" if none does.
    """

    check: str
    name: str
    rank: int
    error: float
    cause: str = ""


@dataclass
class Report:
    """is_equal: whether all comparisons found equal numbers. verdict: one sentence. cause: the fault's name,
    "" if there is no fault or none that is known. rows: worst first. checks: the largest error of each
    comparison that was made. notes: what the reader should know of the check itself. tolerance: up to here an
    error is rounding.
    """

    tolerance: float
    is_equal: bool = True
    verdict: str = ""
    cause: str = ""
    rows: list[Row] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, rows: list[Row]) -> None:
        """Add comparisons; of each name the worst one stays."""
        worst = {row.name: row for row in self.rows}
        for row in rows:
            self.checks[row.check] = max(row.error, self.checks.get(row.check, 0.0))
            if row.name not in worst or (row.error, row.cause) > (
                worst[row.name].error,
                worst[row.name].cause,
            ):
                worst[row.name] = row
        self.rows = sorted(worst.values(), key=lambda row: (-row.error, row.name))

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        wrong = [row for row in self.rows if not row.error <= self.tolerance]
        shown = (wrong or self.rows)[:_SHOWN]
        width = max([len(row.name) for row in shown] + [9])
        lines = [f"{'parameter':<{width}}  rank    error  compared"]
        for row in shown:
            cause = f": {row.cause}" if row.cause else ""
            lines.append(f"{row.name:<{width}}  {row.rank:>4}  {row.error:.1e}  {row.check}{cause}")
        if len(self.rows) > len(shown):
            lines.append(f"and {len(self.rows) - len(shown)} more, with smaller errors")
        return "\n".join([*lines, *(f"note: {each}" for each in self.notes), self.verdict])
