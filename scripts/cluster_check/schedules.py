"""All schedules over all ranks: their losses beside plain autograd's."""

from __future__ import annotations

from cluster_check.rows import Check
from cluster_check.training import rows
from zbpp.planning import SCHEDULES


def run(check: Check) -> None:
    rows(check, [(name, {}, name) for name in SCHEDULES])
