"""Audit the installed packages: do they fit together, and does the package index know of security holes?

    python scripts/dev/audit.py              what this environment has installed
    python scripts/dev/audit.py numpy torch  these packages only

Asks the index that pip is configured for, at its JSON address. An index that does not answer, as offline, or
that serves no such data, is said and is no failure. A hole that a later version has closed is one (exit
status 1); a hole that no version has closed is printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from typing import Any

from pip._internal.models.index import PyPI

_TIMEOUT = 10.0  # s for an answer
_LARGEST = 2**26  # bytes of an answer
_OWN = {"zbpp"}


def main(wanted: list[str]) -> int:
    """The exit status."""
    fits = subprocess.run([sys.executable, "-m", "pip", "check"], check=False).returncode == 0
    found = {each.metadata["Name"]: each.version for each in distributions()}
    packages = sorted(
        (name, version.partition("+")[0])
        for name, version in found.items()
        if name.lower() not in _OWN and (not wanted or name.lower() in wanted)
    )
    base = _json_address()
    try:
        _asked(f"{base}/pip")
    except (OSError, ValueError) as error:
        print(f"not audited: the package index does not answer ({str(error)[:200]})")
        return 0 if fits else 1
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda each: _holes(base, *each), packages))
    unknown = [
        f"{name} {version}" for (name, version), each in zip(packages, answers, strict=True) if each is None
    ]
    num_holes = num_closed = 0
    for (name, version), holes in zip(packages, answers, strict=True):
        for hole in holes or ():
            closed = ", ".join(hole.get("fixed_in") or ())
            num_holes, num_closed = num_holes + 1, num_closed + bool(closed)
            print(f"{name} {version}: {hole.get('id')}, closed in {closed or 'no version yet'}")
    print(f"audited {len(packages) - len(unknown)} of {len(packages)} packages: {num_holes} known holes")
    if unknown:
        print(f"the index says nothing of {', '.join(unknown)}")
    return 0 if fits and not num_closed else 1


def _json_address() -> str:
    """Where the index that pip uses answers in JSON."""
    given = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return re.sub(r"/simple/?$", "/pypi", given) if given else PyPI.pypi_url


def _asked(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/json", timeout=_TIMEOUT) as answer:
        found: dict[str, Any] = json.loads(answer.read(_LARGEST))
    return found


def _holes(base: str, name: str, version: str) -> list[dict[str, Any]] | None:
    """The known holes of a version, or None if the index does not say.

    Some mirrors answer for a package's newest version alone.
    """
    for address in (f"{base}/{name}/{version}", f"{base}/{name}"):
        try:
            found = _asked(address)
            if found["info"]["version"] == version:
                return [each for each in found["vulnerabilities"] if not each.get("withdrawn")]
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


if __name__ == "__main__":
    sys.exit(main([each.lower() for each in sys.argv[1:]]))
