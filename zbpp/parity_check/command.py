"""Does a trainer compute what one process computes? See docs/parity.md.

    torchrun --nproc-per-node 2 -m zbpp.parity my_file:case

`case` is a function in my_file.py that returns the arguments of zbpp.parity as a dict. Every rank calls it,
inside the job's process group. The status is 0 if all is equal, 1 if not, 2 if the check can't be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from zbpp.job.world import world
from zbpp.parity_check.check import parity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m zbpp.parity", description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.add_argument("case", help="FILE:FUNCTION or module:FUNCTION")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    given = parser.parse_args(arguments)
    module, _, function = given.case.partition(":")
    if not function:
        parser.exit(2, f"error: {given.case}: write FILE:FUNCTION, such as my_file:case\n")
    sys.path.insert(0, "")  # files of the current folder
    with world(device=given.device) as here:
        try:
            case = getattr(import_module(module.removesuffix(".py")), function)
            report = parity(**case())
        except (ValueError, ImportError, AttributeError) as error:
            if here.rank == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2
        if here.rank == 0:
            print(report)
            if given.json is not None:
                given.json.write_text(report.to_json())
    return 0 if report.is_equal else 1
