#!/usr/bin/env python
"""Text to tokens that runs map from disk, from text, json, parquet, csv and saved datasets.

    python scripts/prepare_data.py runs/tokens book.txt chapters/             # bytes; *.txt in a folder
    python scripts/prepare_data.py runs/tokens posts.jsonl --field body --tokenizer tokenizer.json \\
        --end-token "<|endoftext|>"
    python scripts/prepare_data.py runs/tokens saved_dataset --split train    # of datasets.save_to_disk

Train on the result by data=tokens data.path=runs/tokens. A run that was cut short goes on where it was.
Needs Hugging Face's package `datasets`: pip install zbpp[hf].
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zbpp.data.prepare import Reading, prepare
from zbpp.data.prepared import Header


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for a mistake, and leave with status 1."""
    options = parse(arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    try:
        header = prepare(
            options.sources,
            options.output,
            reading=Reading(
                field=options.field,
                split=options.split,
                pattern=options.pattern,
                separator=options.separator and options.separator.replace("\\n", "\n").replace("\\t", "\t"),
            ),
            tokenizer=options.tokenizer,
            end_token=options.end_token,
            held_out=options.held_out,
            processes=options.processes,
            overwrite=options.overwrite,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on where it was")
    print(f"written to {options.output}: {described(header)}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("output", type=Path, metavar="OUTPUT", help="the folder to make")
    add("sources", type=Path, nargs="+", metavar="SOURCE", help="file, folder of files, dataset on disk")
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; without: a token is a byte")
    add("--end-token", metavar="TOKEN", help="stands after each document; '' with bytes: token 256")
    add("--field", default="text", help="the column with the text; default text")
    add("--split", help="of a dataset that has several")
    add("--pattern", default="*.txt", help="names of the files to take from a folder; default *.txt")
    add("--separator", metavar="TEXT", help=r"cuts a text into documents: '\n\n'; without: one a file")
    add("--held-out", type=float, default=0.05, metavar="SHARE", help="of the documents, for evaluation; .05")
    cores = len(os.sched_getaffinity(0))
    add("--processes", type=int, default=cores, metavar="N", help=f"default {cores}: your cores")
    add("--overwrite", action="store_true", help="replace OUTPUT if it exists, once the new one is whole")
    return parser.parse_args(arguments)


def described(header: Header) -> str:
    """The header in one line."""
    parts = (
        f"{part.num_tokens:,} tokens of {part.num_documents:,} documents ({name})"
        for name, part in header.parts.items()
    )
    return f"{', '.join(parts)}; {header.dtype}, vocab_size={header.vocab_size}"


if __name__ == "__main__":
    main()
