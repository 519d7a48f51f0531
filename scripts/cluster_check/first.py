"""A first step of every schedule, whose stages compile in it.

Ranks compile one after the other, longer than a message usually takes, while other ranks wait for theirs.
"""

from __future__ import annotations

from cluster_check.rows import Check
from cluster_check.training import rows
from zbpp.planning import SCHEDULES


def run(check: Check) -> None:
    rows(check, [(f"{name}, compiled", {}, name) for name in SCHEDULES], is_compiled=True)
