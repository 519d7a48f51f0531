"""Train a model in a pipeline.

    python scripts/train.py parallel.num_ranks=4 schedule=zb_h1 model=gpt_tiny steps=50
    torchrun --standalone --nproc-per-node 4 scripts/train.py schedule=zb_h1 model=gpt_tiny steps=50

The first starts its ranks on this machine by itself; torchrun restarts them, too, and reaches other machines.
"""

import os
import time
from typing import Any

from omegaconf import DictConfig

from zbpp import command_line
from zbpp import config as configs

GRACE = 3.0  # s in which the rank with the root cause can bring the job down first


def main(config: DictConfig) -> None:
    job = configs.typed(config), configs.flat(config), configs.as_yaml(config)
    num_ranks = job[0].parallel.num_ranks or 1
    if "RANK" not in os.environ and num_ranks > 1:
        from zbpp.app import check_plan
        from zbpp.launch import on_ranks
        from zbpp.training.run_folder import check_free

        check_plan(job[0], num_ranks)
        check_free(job[0].run_dir, overwrite=job[0].overwrite)
        on_ranks(num_ranks, train, job)
    else:
        from torch.distributed.elastic.multiprocessing.errors import record

        record(train)(job)  # below hydra.main: above it, Hydra would swallow the root cause


def train(job: tuple[Any, ...]) -> None:
    """What each rank does; importable, since it is pickled."""
    from zbpp import app
    from zbpp.runtime import CommunicationError

    try:
        app.train(*job)
    except CommunicationError:
        time.sleep(GRACE)  # a peer that died has the better traceback
        raise


if __name__ == "__main__":
    command_line.run(main, "train", __doc__)
