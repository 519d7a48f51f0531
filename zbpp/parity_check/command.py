"""Does a trainer compute what one process computes? See docs/parity.md.

    torchrun --nproc-per-node 2 -m zbpp.parity my_file:case

`case` is a function in my_file.py that returns the arguments of zbpp.parity as a dict. Every rank calls it,
inside the job's process group. A rank's status is 0 if all is equal, 1 if not, 2 if the check can't be made;
torchrun's is then 0, 1 and 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbpp.error_text import did_you_mean, kind_of
from zbpp.job.world import world
from zbpp.parity_check.check import parity

_ALONE = " (there is one process: torchrun --standalone --nproc-per-node 2 -m zbpp.parity ... starts two)"


def _checked(case: str, found: object) -> dict[str, Any]:
    """What a case has returned. Raises ValueError unless these are arguments of `parity`."""
    if not isinstance(found, dict):
        raise ValueError(f"{case} returned {kind_of(found)}: return a dict with the arguments of zbpp.parity")
    known = signature(parity).parameters
    for name in found:
        if name not in known:
            raise ValueError(f"{case}: zbpp.parity has no argument {name!r}{did_you_mean(str(name), known)}")
    missing = [name for name, each in known.items() if each.default is each.empty and name not in found]
    if missing:
        raise ValueError(f"{case}: {', '.join(missing)} is missing: zbpp.parity needs it (docs/parity.md)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m zbpp.parity", description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.add_argument("case", help="FILE:FUNCTION or module:FUNCTION")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--device", default="auto", help="cpu, auto, or the name of an accelerator")
    given = parser.parse_args(arguments)
    module, _, function = given.case.partition(":")
    if not function:
        parser.exit(2, f"error: {given.case}: write FILE:FUNCTION, such as my_file:case\n")
    path = Path(module.removesuffix(".py"))  # or a module's name, which has no folder
    sys.path.insert(0, str(path.parent))
    with world(device=given.device) as here:
        found: object = None
        try:
            case = getattr(import_module(path.name), function)
            found = case()
            report = parity(**_checked(given.case, found))
        except (ValueError, ImportError, AttributeError) as error:
            if here.rank == 0 or found is None:  # the case may have failed on this rank alone
                of_rank = f" on rank {here.rank}" if here.rank else ""
                print(f"error{of_rank}: {error}{'' if dist.is_initialized() else _ALONE}", file=sys.stderr)
            return 2
        if here.rank == 0:
            print(report)
            if given.json is not None:
                given.json.write_text(report.to_json())
    return 0 if report.is_equal else 1
