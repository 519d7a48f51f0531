"""Train a model in a pipeline.

    torchrun --standalone --nproc-per-node 4 scripts/train.py schedule=zb_h1 model=gpt_tiny steps=50

Choices are files in configs/; `--help` lists them, `--cfg job` prints the resulting config.
"""

import os
import sys
import time

import hydra
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

from zbpp import config as configs

configs.register()
FOLDER = str(configs.config_folder())
GRACE = 3.0  # s in which the rank with the root cause can bring the job down first


@hydra.main(config_path=FOLDER, config_name="train", version_base="1.3")
@record  # below hydra.main: above it, Hydra would swallow the root cause
def main(config: DictConfig) -> None:
    from zbpp import app  # after Hydra's own --help and --cfg, which need no torch
    from zbpp.runtime import AgreementError, CommunicationError, DeviceError
    from zbpp.schedule import PlanError

    os.environ["HYDRA_FULL_ERROR"] = "1"  # from here on, whole tracebacks instead of Hydra's excerpts
    try:
        app.train(configs.typed(config), configs.flat(config), configs.as_yaml(config))
    except (configs.ConfigError, PlanError, AgreementError, DeviceError) as error:
        refuse(error)
    except CommunicationError:
        time.sleep(GRACE)  # a peer that died has the better traceback
        raise


def refuse(error: Exception) -> None:
    """One line and no traceback; once, where all ranks were refused for the same reason."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(GRACE)
    sys.exit(f"error: {error}")


if __name__ == "__main__":
    try:
        sys.argv[1:] = configs.quiet_other_ranks(sys.argv[1:])
    except configs.ConfigError as error:
        refuse(error)
    main()
