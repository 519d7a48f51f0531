"""Train a model in a pipeline.

    zbpp train -n 4 schedule=zb_h1 model=gpt_tiny steps=50
    torchrun --standalone --nproc-per-node 4 -m zbpp.train schedule=zb_h1 model=gpt_tiny steps=50

The first starts its ranks on this machine; torchrun also restarts ranks, and reaches other machines.
-n N is short for parallel.num_processes=N.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from zbpp.commands import command_line
from zbpp.config import Composed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `zbpp train`; arguments None: those of this process."""
    command_line.run(_train, "train", __doc__, arguments)


def _train(composed: Composed) -> None:
    num_ranks = composed.tree.parallel.num_processes or 1
    if "RANK" not in os.environ and num_ranks > 1:
        from zbpp.launch import on_ranks, prepare_ranks

        prepare_ranks()
        from zbpp.run import app

        app.check_before_start(composed.tree, num_ranks)
        on_ranks(num_ranks, app.train, composed)
    else:
        from torch.distributed.elastic.multiprocessing.errors import record

        from zbpp.run import app

        record(app.train)(composed)  # inside Hydra: outside, Hydra would hide the root cause from torchrun
