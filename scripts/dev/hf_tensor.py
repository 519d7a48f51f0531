#!/usr/bin/env python
"""Print which causal language models of Hugging Face can be sharded over two ranks, and why others can't.

It tries every family whose config class has a base_model_tp_plan, with the sizes of that class made narrow.
"equal" means: sharded by that plan over two processes (gloo), the model gives the logits and the gradients of
the whole model.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from hf_families import config_of, one_line
from torch.distributed.device_mesh import init_device_mesh

from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.models.hf.parallel import try_out

Row = tuple[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="such as llama qwen3; all that have a plan by default")
    parser.add_argument("--out", type=Path, help="a file for the table, too")
    options = parser.parse_args()
    rows: list[Row] = on_ranks(2, sweep, (options.families or families_with_plan(), options.out))
    print(report(rows), end="")


def families_with_plan() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as families

    return [each for each in families if getattr(CONFIG_MAPPING[each], "base_model_tp_plan", None)]


def sweep(job: tuple[list[str], Path | None]) -> list[Row]:
    """What each rank does with (families, a file for the table)."""
    import transformers

    families, out = job
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    rows = []
    with world(device="cpu") as here:
        mesh = init_device_mesh("cpu", (here.size,))
        for family in families:
            rows.append((family, answer(family, mesh)))
            if out and here.rank == 0:  # after each family, since all of them take a while
                out.write_text(report(rows))
    return rows


def answer(family: str, mesh: Any) -> str:
    try:
        config = config_of(family, {"num_hidden_layers": 2})
    except Exception as error:  # whatever a config class may raise
        return f"no config: {one_line(error)}"
    try:
        try_out(config, mesh, 0)
    except ValueError as error:
        return f"refused: {one_line(error)}"
    except Exception as error:  # the library itself can't build or run the model
        return f"no model: {type(error).__name__}: {one_line(error)}"
    return "equal"


def report(rows: list[Row]) -> str:
    """The count of equal families, and the table."""
    import transformers

    equal = sum(text == "equal" for _, text in rows)
    head = (
        f"$ python scripts/dev/hf_tensor.py     (transformers {transformers.__version__}, torch "
        f"{torch.__version__}: {len(rows)} families with a plan, {equal} equal on two ranks)"
    )
    return "\n".join([head, *[f"{family:30}{text}" for family, text in rows]]) + "\n"


if __name__ == "__main__":
    main()
