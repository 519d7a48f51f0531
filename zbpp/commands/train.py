"""Train a model in a pipeline.

    zbpp train -n 4 schedule=zb_h1 model=gpt_tiny steps=50
    torchrun --standalone --nproc-per-node 4 -m zbpp.train schedule=zb_h1 model=gpt_tiny steps=50

The first starts its ranks on this machine; torchrun also restarts ranks, and reaches other machines.
-n N is short for parallel.num_processes=N. `zbpp train runs/first` goes on with the run in this folder, with
all keys that it had; `zbpp train runs/first run_dir=runs/again steps=100` runs it anew, with other steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zbpp.commands import command_line
from zbpp.config import Composed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `zbpp train`; arguments None: those of this process."""
    command_line.run(_train, "train", __doc__, arguments)


def _train(composed: Composed) -> None:
    num_ranks = composed.tree.parallel.num_processes or 1
    if "RANK" not in os.environ and num_ranks > 1:
        _start_ranks(num_ranks, composed)
    else:
        _be_a_rank(composed)


def _start_ranks(num_ranks: int, composed: Composed) -> None:
    from zbpp.launch import RankDeath, Refusal, on_ranks, prepare_ranks

    prepare_ranks()
    from zbpp.run import app
    from zbpp.training.run_folder import same_command

    app.check_before_start(composed.tree, num_ranks)
    try:
        on_ranks(num_ranks, app.train, composed)
    except RankDeath as death:
        raise Refusal(f"{death}: {same_command(Path(composed.tree.run_dir))}") from death


def _be_a_rank(composed: Composed) -> None:
    from zbpp.launch import set_threads
    from zbpp.tracebacks import hiding_own_frames

    if set_threads() and "RANK" not in os.environ and (os.cpu_count() or 1) > 1:
        print("one thread, as every rank has; OMP_NUM_THREADS=... sets another number", flush=True)
    from torch.distributed.elastic.multiprocessing.errors import record

    from zbpp.run import app

    record(hiding_own_frames(app.train))(
        composed
    )  # inside Hydra: outside, Hydra would hide the root cause from torchrun
