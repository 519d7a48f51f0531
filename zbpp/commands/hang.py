"""Show which rank the others waited for when a job failed, from the records in a run's folder.

    zbpp hang runs/mine

A rank that fails, waits in vain, or stands still for parallel.timeout leaves a record in RUN_DIR/failure: its
last instructions with their times, and its stack. The first line says which rank is to blame; a rank that
left no record was killed or stopped. The table shows for each rank its instruction, for how long the rank had
been there, and the rank that it waited for. The plan around each rank's place follows.
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
    parser = argparse.ArgumentParser(
        prog="zbpp hang", description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="a run's folder, or one with flight-rank-N.json files")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.exit(2, f"error: there is no folder {folder}\n")
    found = sorted((folder / "failure").glob(_RECORDS)) or sorted(folder.glob(_RECORDS))
    if not found:
        parser.exit(
            2,
            f"error: {folder} holds no {_RECORDS}: no call of this run has failed, or it had one rank. A run "
            "that hangs writes them when a rank has waited for parallel.timeout\n",
        )
    from zbpp.render import render_hang

    try:
        text = render_hang(_of_one_job([json.loads(path.read_text()) for path in found]))
        print("\n".join(map(printable, text.splitlines())))  # a terminal would obey control characters
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError, PlanError) as error:
        parser.exit(2, f"error: {found[0].parent} holds files that are no records: {error}\n")
    return 0


def _of_one_job(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The records of the start that wrote last, not of earlier ones, by the rank's number in the job."""
    last = max(records, key=lambda record: float(record["written"]))["job"]
    kept = [record for record in records if record["job"] == last]
    if len(kept) < len(records):
        print(f"left out: {len(records) - len(kept)} records of an earlier start")
    return {int(record["process"]): record for record in kept}
