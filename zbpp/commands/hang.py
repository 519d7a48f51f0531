"""Show where each rank stood when a call failed or waited in vain, from the records in a run's folder.

    zbpp hang runs/mine

When a call of a job of several ranks fails, each rank that can still write leaves a record in
RUN_DIR/failure: its last instructions, where it stood, and where it last knew the other ranks to be. The
table shows for each rank its instruction, how long the rank had been there, and the rank that it waited for.
A rank that could not write, because it was stopped or dead, is shown where the other ranks last knew it. The
plan around each rank's place follows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbpp.schedule import PlanError
from zbpp.schedule.timetable import printable

_RECORDS = "flight-rank-*.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zbpp hang`; the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="zbpp hang", description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, help="a run's folder, or one with flight-rank-N.json files")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.exit(1, f"error: there is no folder {folder}\n")
    found = sorted((folder / "failure").glob(_RECORDS)) or sorted(folder.glob(_RECORDS))
    if not found:
        parser.exit(
            1,
            f"error: {folder} holds no {_RECORDS}: no call of this run has failed, or it had one rank. A run "
            "that hangs writes them when a rank has waited for parallel.timeout\n",
        )
    from zbpp.render import render_hang

    try:
        text = render_hang(_of_one_pipeline([json.loads(path.read_text()) for path in found]))
        print("\n".join(map(printable, text.splitlines())))  # a terminal would obey control characters
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError, PlanError) as error:
        parser.exit(1, f"error: {found[0].parent} holds files that are no records: {error}\n")
    return 0


def _of_one_pipeline(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The records of the pipeline that wrote last, by rank: not those of replicas and earlier failures."""
    last = max(records, key=lambda record: record["standing"]["told"])["pipeline"]
    kept = [record for record in records if record["pipeline"] == last]
    if len(kept) < len(records):
        print(f"left out: {len(records) - len(kept)} records of another replica or an earlier failure")
    return {record["standing"]["rank"]: record for record in kept}
