"""Sizes and limits of a cluster check."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

PARTS = ("links", "schedules", "meshes", "speed", "hang")
FIRST_NODE = "first-node"  # a file that rank 0 leaves: its node prints the table
BEGUN = f"begun-{socket.gethostname()}"  # a file that says that the ranks of this node have begun
WANTED = "parts"  # a file with a line for each job: its parts


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All counts are at least 1.

    timeout: seconds that a rank waits for another; hang_timeout: the same in the hang test. message_mib: the
    large message of the links. hidden, layers, sequence, rows: of the model whose steps are timed: layers per
    rank, tokens of a row, rows of a microbatch. microbatches: of a timed step, for each rank. steps: timed
    steps of each schedule. timed: the schedules that are timed. heavy: whether meshes run zb_h1 beside zb_v.
    search: seconds of a planner's search.
    """

    out: Path
    device: str = "auto"
    timeout: float = 180.0
    hang_timeout: float = 30.0
    message_mib: int = 64
    hidden: int = 2048
    layers: int = 8
    sequence: int = 2048
    rows: int = 1
    microbatches: int = 2
    steps: int = 5
    timed: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
    heavy: bool = True
    search: float = 5.0

    def small(self) -> Settings:
        """The same check in a form for two CPU processes."""
        return replace(
            self,
            timeout=60.0,
            hang_timeout=4.0,
            message_mib=1,
            hidden=32,
            layers=2,
            sequence=16,
            steps=2,
            timed=("1f1b", "zb_h1"),
            heavy=False,
            search=0.5,
        )
