#!/usr/bin/env python
"""`zbpp plan` from a clone: choose, print, compare and draw timetables. Needs numpy, no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# A fresh clone plans without being installed: installing would bring torch.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.commands import plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return plan.main(arguments, prog="plan.py", scripts=os.path.relpath(Path(__file__).parent))


if __name__ == "__main__":
    sys.exit(main())
