"""The compositions of replicas, shards and tensor parallelism that the number of ranks allows."""

from __future__ import annotations

import math

from cluster_check.rows import Check
from cluster_check.training import Case, rows
from zbpp.runtime.processes.mesh import DIMENSIONS

DEGREES: tuple[dict[str, int], ...] = (
    {"replicate": 2},
    {"shard": 2},
    {"tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "shard": 2},
    {"replicate": 2, "shard": 2, "tensor": 2},
    {"tensor": 8},
)


def run(check: Check) -> None:
    size, cases = check.here.size, list[Case]()
    for degrees in DEGREES:
        if size % math.prod(degrees.values()) == 0:
            whole = {"pipeline": size // math.prod(degrees.values()), **degrees}
            text = " x ".join(f"{name} {whole[name]}" for name in DIMENSIONS if name in whole)
            cases += [(f"{text}, {name}", degrees, name) for name in ("zb_h1", "zb_v")]
    rows(check, cases)
