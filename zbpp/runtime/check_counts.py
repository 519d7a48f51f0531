"""How often a pipeline has checked itself against silent corruption, and found everything equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class CheckCounts:
    """What was compared.

    replay: steps that ran twice. replicas: calls of check_replicas in which a tensor had a copy.
    messages: those that came to this rank.
    """

    replay: int = 0
    replicas: int = 0
    messages: int = 0


class MessageChecks(NamedTuple):
    """For links whose messages have checksums. when: the call that runs, for errors, such as `in step 5`."""

    when: Callable[[], str]
    counts: CheckCounts
