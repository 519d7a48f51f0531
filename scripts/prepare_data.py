#!/usr/bin/env python
"""Text to tokens that runs map from disk: text files, jsonl, Hugging Face datasets; bytes or any tokenizer.

    python scripts/prepare_data.py runs/tokens book.txt chapters/             # bytes; *.txt in a folder
    python scripts/prepare_data.py runs/tokens posts.jsonl --field body --tokenizer tokenizer.json \\
        --end-token "<|endoftext|>"
    python scripts/prepare_data.py runs/tokens saved_dataset --split train    # of datasets.save_to_disk
    python scripts/prepare_data.py --check runs/tokens                        # read it all, compare checksums

Train on the result by data=tokens data.path=runs/tokens. A run that was cut short goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from zbpp.data.documents import Reading
from zbpp.data.prepare import prepare
from zbpp.data.prepared import Header, open_prepared


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for a mistake, and leave with status 1."""
    options = parse(arguments)
    try:
        if options.check:
            prepared = open_prepared(options.output)
            prepared.check()
            print(f"{options.output}: as its header says: {described(prepared.header)}")
            return
        with progress() as show:
            header = prepare(
                options.sources,
                options.output,
                reading=Reading(
                    field=options.field,
                    split=options.split,
                    pattern=options.pattern,
                    separator=None if options.separator is None else unescaped(options.separator),
                ),
                tokenizer=options.tokenizer,
                end_token=options.end_token,
                held_out=options.held_out,
                processes=options.processes,
                overwrite=options.overwrite,
                progress=show,
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
    add(
        "sources",
        type=Path,
        nargs="*",
        metavar="SOURCE",
        help="text, .jsonl, folder, dataset on disk",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; without: a token is a byte")
    add("--end-token", metavar="TOKEN", help="stands after each document; '' with bytes: token 256")
    add("--field", default="text", help="of a jsonl line or a dataset's row; default text")
    add("--split", help="of a dataset that has several")
    add("--pattern", help="names of the files to take from a folder; default *.txt")
    add(
        "--separator",
        metavar="TEXT",
        help=r"cuts a text into documents: '\n\n'; without: one a file",
    )
    add("--held-out", type=float, default=0.05, metavar="SHARE", help="of the documents, for evaluation; .05")
    add(
        "--processes",
        type=int,
        default=cores(),
        metavar="N",
        help=f"default {cores()}: your cores",
    )
    add("--overwrite", action="store_true", help="replace OUTPUT if it exists, once the new one is whole")
    add("--check", action="store_true", help="compare OUTPUT with its checksums; make nothing")
    options = parser.parse_args(arguments)
    if bool(options.sources) == options.check:
        parser.error("name SOURCEs to prepare, or --check with none")
    return options


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def unescaped(text: str) -> str:
    r"""`\n` and `\t` as a shell passes them."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def described(header: Header) -> str:
    """The header in one line."""
    parts = (
        f"{part.num_tokens:,} tokens of {part.num_documents:,} documents ({name})"
        for name, part in header.parts.items()
    )
    return f"{', '.join(parts)}; {header.dtype}, vocab_size={header.vocab_size}"


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with (bytes done, bytes in all): a bar in a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    main()
