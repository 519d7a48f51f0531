"""Write the model that a run has trained as a folder that Hugging Face's transformers loads.

    zbpp export runs/mine mine_hf
    zbpp export runs/mine mine_hf --dtype bfloat16 --file-size 2GB
    zbpp export runs/lora adapter                 a run with finetune.lora: the folder that peft loads
    zbpp export runs/lora merged_hf --merge       the base model with the adapter merged into it, by peft

RUN is the run_dir of a zbpp train with model=huggingface, from a config or from a folder, or with one of the
llama models; or a checkpoint in it, RUN/checkpoints/step-200. Of a run, the weights saved at its end are
written, else those of its newest whole checkpoint. FOLDER gets config.json, safetensors (several with an
index above --file-size), the generation config, and the tokenizer and chat template that the data used, else
those of the folder that the model came from.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zbpp.tracebacks import wants_traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zbpp export`; the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="zbpp export", description=__doc__, formatter_class=layout)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run_dir of zbpp train")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the numbers; default: as they are saved",
    )
    parser.add_argument(
        "--file-size",
        default="2GB",
        help="the most that a file holds, such as 500MB (default: 2GB)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapter of a LoRA run into its base model, which is then whole in memory",
    )
    given = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # the run's config may name a class of the user's
    try:
        from zbpp.run.export import export  # torch: --help does without

        options = {"dtype": given.dtype, "file_size": given.file_size, "is_merged": given.merge}
        export(given.run, given.folder, **options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if wants_traceback():
            raise
        parser.exit(2, f"error: {error}\n")
    print(f"written to {given.folder}")
    return 0
