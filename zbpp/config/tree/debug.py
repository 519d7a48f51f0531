"""The config of the checks against silent corruption: configs' key `debug`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from zbpp.ranges import Checked, ConfigError, ranged

MESSAGES, REPLICAS, REPLAY = CHECKS = ("messages", "replicas", "replay")


@dataclass(kw_only=True)
class DebugConfig(Checked):
    """Checks against silent corruption.

    check: messages: each message between ranks carries a checksum; replicas: copies of a tensor are compared;
        replay: a step runs twice, under two timetables. A list, or one text with commas.
    every: steps between two checks of replicas, and between two replays; the first step of a start is
        checked, too. By default less than `checkpoint.every`, so that a good checkpoint is left.
    """

    prefix: ClassVar[str] = "debug."
    check: Any = field(default_factory=list)
    every: int = ranged(100, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.check.split(",") if isinstance(self.check, str) else self.check
        given = given if isinstance(given, Iterable) and not isinstance(given, dict) else [given]
        names = [str(each).strip() for each in given]
        names = [each for each in names if each not in ("", "none", "None")]
        unknown = [each for each in names if each not in CHECKS]
        if unknown:
            raise ConfigError(
                f"debug.check={','.join(names)}: there is no check {unknown[0]}; write a list of "
                f"{', '.join(CHECKS)}, such as debug.check=[messages,replicas], or []"
            )
        self.check = list(dict.fromkeys(names))
