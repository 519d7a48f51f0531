#!/usr/bin/env python
"""Tokens a second of the data path alone, beside what training needs; and what an index of 1e9 tokens costs.

    python scripts/bench_data.py
    python scripts/bench_data.py --folder /local/disk --out scripts/results/data_cpu.txt

The tokens are a sparse file of 2 GB, which takes no space on most disks; it is deleted at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zbpp.benchmark.data_path import measure


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a mark was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put 2 GB")
    parser.add_argument("--tokens", type=int, default=10**9, metavar="N", help="in the index; default 1e9")
    parser.add_argument("--batches", type=int, default=300, metavar="N", help="read for each figure; 300")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args(arguments)
    if options.tokens < 10**7 or options.batches < 1:
        parser.error("write --tokens 10000000 or more, --batches 1 or more")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text, is_met = measure(Path(folder), options.tokens, options.batches)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
