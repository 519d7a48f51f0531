"""Feed changed files to every parser of files that somebody else may have written, for as long as you like.

    python scripts/dev/fuzz.py --minutes 10
    python scripts/dev/fuzz.py --minutes 1 --seed 7 --only costs

Prints each file after which a parser hung, took endless memory or raised an error that is not documented.
The parsers, the bounds and the changes are those of tests/helpers/fuzzing.py, which the test suite uses, too.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from helpers.fuzzing import PARSERS, complaint, mutated

_EVERY = 5.0  # s between two lines of progress


def main() -> int:
    """The exit status: 1 if anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds make equal files")
    parser.add_argument("--only", choices=PARSERS, help="one parser; default: all in turns")
    given = parser.parse_args()
    names = [given.only] if given.only else list(PARSERS)
    begin = shown = time.monotonic()
    found: Counter[tuple[str, str]] = Counter()
    number = 0
    with TemporaryDirectory(prefix="zbpp-fuzz-") as folder:
        while time.monotonic() - begin < given.minutes * 60:
            name, rng = names[number % len(names)], random.Random(f"{given.seed} {number}")
            content = mutated(rng.choice(PARSERS[name].samples), rng)
            told = complaint(PARSERS[name], content, Path(folder))
            if told:
                found[name, told.partition(":")[0]] += 1
                if found[name, told.partition(":")[0]] == 1:
                    print(
                        f"{name}, file {number} of seed {given.seed}: {told}\n  {content[:500]!r}", flush=True
                    )
            number += 1
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                print(f"{shown - begin:.0f} s: {number} files, {found.total()} findings", flush=True)
    print(f"{number} files under seed {given.seed}: {found.total()} findings")
    for (name, kind), count in found.most_common():
        print(f"  {name}: {kind}, {count} times")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
