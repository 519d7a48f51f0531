"""What the device has seen: waits of the host, accesses that no event orders, contexts; each with a stack."""

from __future__ import annotations

import traceback
from collections import Counter

from accelerator.load import library

waits: Counter[str] = Counter()
"""{kind of a wait of the host for the device, and where: how often}."""
faults: list[str] = []
contexts: list[str] = []

_NUM_LINES = 6
_SKIPPED = ("/torch/", "/accelerator/", "/multiprocessing/")


def install() -> None:
    """Let the library report to this module."""
    library.on_wait(lambda kind: waits.update([f"{kind} | {_where()}"]))
    library.on_fault(lambda text: faults.append(f"{text} | {_where()}"))
    library.on_context(lambda device: contexts.append(f"{library.name}:{device} | {_where()}"))


def taken_faults() -> list[str]:
    """The faults so far, each place once; afterwards there are none."""
    found = {"".join(each for each in text if not each.isdigit()): text for text in faults}
    faults.clear()
    return [*found.values()]


def _where() -> str:
    """The innermost lines of the calling thread that are not torch's."""
    stack = traceback.extract_stack()
    lines = [each for each in stack if not any(part in each.filename for part in _SKIPPED)][-_NUM_LINES:]
    return " > ".join(
        f"{'/'.join(each.filename.split('/')[-2:])}:{each.lineno} {each.name}" for each in lines
    )
