"""Whether the rank that stopped was found in time: read from the files that the ranks left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, OK, Row
from zbpp.render import render_hang

BEGIN = "begin.json"
_SPARE = 15.0  # s beyond the timeout in which the ranks have to have said so


def verdict(out: Path, interrupted: str = "") -> Row | None:
    """The row of the hang test, from what the ranks left; None if the test was never begun.

    interrupted: the signal that ended the check, maybe before any rank could name the one that stopped.
    """
    folder = out / "hang"
    if not (folder / BEGIN).is_file():
        return None
    facts = _whole(folder / BEGIN)
    if facts is None:
        return Row("hang", "a rank stops", FAILED, f"{BEGIN} is cut off: is the disk full?", {})
    name, victim = f"rank {facts['victim']} stops in F", f"rank {facts['victim']}"
    answers = [said for path in sorted(folder.glob("said-*.json")) if (said := _whole(path)) is not None]
    found = [record for path in sorted(folder.glob("flight-*.json")) if (record := _whole(path)) is not None]
    records = {int(record["process"]): record for record in found}
    headline = render_hang(records).partition("\n")[0] if records else ""
    numbers: dict[str, Any] = {**facts, "answers": answers, "headline": headline}
    limit = facts["timeout"] + _SPARE
    if f"{victim} is behind" not in headline:
        if interrupted:
            return Row("hang", name, NOT_RUN, f"ended by {interrupted} while this ran", numbers)
        heard = headline or (answers[0]["said"] if answers else "no rank left a word: see hang.log")
        return Row("hang", name, FAILED, f"nothing names it; {heard.partition(chr(10))[0]}", numbers)
    after = min(float(record["written"]) for record in found) - facts["begin"]
    text = (
        f"the first of {len(found)} records was written after {after:.1f} s (timeout {facts['timeout']:g} s)"
    )
    return Row("hang", name, OK if after <= limit else FAILED, text, numbers)


def _whole(path: Path) -> dict[str, Any] | None:
    """What a file holds; None for one that was cut off, as on a full disk."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        return None
    return found
