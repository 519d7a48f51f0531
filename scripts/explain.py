"""Print what the split backward does with each weight of one stage: W, or B, and why, with bytes.

    python scripts/explain.py model=llama_tiny num_stages=4 stage=1
    python scripts/explain.py model=mlp data=regression num_stages=2 stage=0
    python scripts/explain.py model=gpt_tiny stage=1 compile=stage

Builds the stage and those before it and runs one microbatch forward; needs no GPU and no torchrun. With
compile=stage or layer as in train.py: what can't be compiled is named, with the reason.
"""

from omegaconf import DictConfig

from zbpp import command_line
from zbpp import config as configs


def main(config: DictConfig) -> None:
    from zbpp import app  # after Hydra's own --cfg, which needs no torch

    print(app.explain_stage(**vars(configs.typed(config))))


if __name__ == "__main__":
    command_line.run(main, "explain", __doc__)
