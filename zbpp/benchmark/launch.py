"""Starting a job's ranks from a script, without torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Refusal(Exception):
    """What a job's ranks can't do, in a line."""


def on_ranks(
    num_ranks: int,
    function: Callable[[Any], Any],
    config: Any,
    refusals: tuple[type[Exception], ...],
) -> Any:
    """function(config) on `num_ranks` new processes; rank 0's result. Raises Refusal for `refusals`.

    `function` must be importable. One thread each, unless OMP_NUM_THREADS says otherwise.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        run_id="zbpp",
    )
    done, result = elastic_launch(launch, _rank)(function, config, refusals)[0]
    if not done:
        raise Refusal(result)
    return result


def _rank(
    function: Callable[[Any], Any], config: Any, refusals: tuple[type[Exception], ...]
) -> tuple[bool, Any]:
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    import torch

    torch.set_num_threads(threads)
    try:
        return True, function(config)
    except refusals as error:
        return False, str(error)
