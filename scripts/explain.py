"""Print what the split backward does with each weight of one stage: W, or B, and why, with bytes.

    python scripts/explain.py model=llama_tiny num_stages=4 stage=1
    python scripts/explain.py model=mlp data=regression num_stages=2 stage=0
    python scripts/explain.py model=gpt_tiny stage=1 compile=stage

Builds the stage and those before it and runs one microbatch forward; needs no GPU and no torchrun. With
compile=stage or layer as in train.py: what can't be compiled is named, with the reason.
Choices are files in configs/; `--help` lists them.
"""

import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import hydra
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zbpp import config as configs


@dataclass(kw_only=True)
class ExplainConfig:
    """Everything this script needs. model and data are built from their `_target_`."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    stage: int = 0
    num_stages: int = 4
    microbatch_size: int = 4
    seed: int = 0
    dtype: str = "float32"
    compile: str = "none"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise configs.ConfigError(f"dtype={self.dtype}: write float32, float64 or bfloat16")
        if self.compile not in ("none", "stage", "layer"):
            raise configs.ConfigError(f"compile={self.compile}: write none, stage or layer")
        if self.microbatch_size < 1:
            raise configs.ConfigError(f"microbatch_size={self.microbatch_size}: write 1 or more")
        if not 0 <= self.stage < self.num_stages:
            last = self.num_stages - 1
            raise configs.ConfigError(
                f"stage={self.stage} does not exist with num_stages={self.num_stages}: write 0 to {last}"
            )


@hydra.main(config_path=str(configs.config_folder()), config_name="explain", version_base="1.3")
def main(config: DictConfig) -> None:
    from zbpp import app  # after Hydra's own --help and --cfg, which need no torch

    try:
        typed = configs.typed(merged(config))
        print(app.explain_stage(**asdict(typed)))
    except configs.ConfigError as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:  # torch's, of a forward that its data don't fit
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        sys.exit(f"error: the forward failed: {error} (HYDRA_FULL_ERROR=1 shows where)")


def merged(config: DictConfig) -> DictConfig:
    """The config with its types. Raises ConfigError for a value of another type."""
    try:
        types: DictConfig = OmegaConf.structured(ExplainConfig)
        types.merge_with(config)
        return types
    except OmegaConfBaseException as error:
        text = str(error).partition("\n")[0]
        raise configs.ConfigError(f"{error.full_key}: {text}") from error


if __name__ == "__main__":
    main()
