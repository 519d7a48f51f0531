"""Whether the rank that stopped was named in time: read from the files that the ranks left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, OK, Row

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
    answers += _from_records(folder, facts["begin"])
    naming = [each for each in answers if f"{victim} is behind" in each["said"]]
    numbers: dict[str, Any] = {**facts, "answers": answers}
    limit = facts["timeout"] + _SPARE
    if not naming and interrupted:
        return Row("hang", name, NOT_RUN, f"ended by {interrupted} while this ran", numbers)
    if not naming:
        heard = answers[0]["said"] if answers else "no rank left a word: see hang.log"
        return Row("hang", name, FAILED, f"nobody named it; {heard.partition(chr(10))[0]}", numbers)
    first = min(naming, key=lambda each: float(each["after"]))
    text = (
        f"rank {first['rank']} named it after {first['after']:.1f} s (timeout {facts['timeout']:g} s); "
        f"{len(naming)} of {facts['victim']} others did"
    )
    return Row("hang", name, OK if first["after"] <= limit else FAILED, text, numbers)


def _whole(path: Path) -> dict[str, Any] | None:
    """What a file holds; None for one that was cut off, as on a full disk."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        return None
    return found


def _from_records(folder: Path, begin: float) -> list[dict[str, Any]]:
    """What flight records say of ranks that died before they could write an answer."""
    found = []
    for path in sorted(folder.glob("flight-rank-*.json")):
        rank = int(path.stem.rpartition("-")[2])
        if not (folder / f"said-{rank}.json").is_file():
            after = path.stat().st_mtime - begin
            found.append({"rank": rank, "after": after, "said": f"left a flight record, {path.name}"})
    return found
