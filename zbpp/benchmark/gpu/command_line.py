"""The command line of scripts/gpu_check.sh."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import zbpp.benchmark.gpu as about
from zbpp.benchmark.gpu.check import Report, check
from zbpp.benchmark.gpu.machine import name_of
from zbpp.benchmark.gpu.marks import all_held
from zbpp.benchmark.gpu.parts import NAMES
from zbpp.benchmark.gpu.report import as_text, write
from zbpp.benchmark.interruption import Interruption

_PROBE = 2**17  # bytes; the files are smaller


def main(arguments: Sequence[str] | None = None, signals: Interruption | None = None) -> int:
    """Exit status 0 if no mark was missed, 1 if one was or no file could be written, 2 for wrong arguments.

    signals: those that end the check; then 128 + the signal's number.
    """
    options, signals = parse(arguments), signals or Interruption()
    report = _run(options, signals)
    try:
        paths, problem = write(report, options.out, options.name or name_of(options.device)), ""
    except OSError as error:  # the text is printed in any case
        paths, problem = [], f"gpu_check: the files could not be written: {error}"
    print(as_text(report))
    print(problem or " ".join(["written:", *map(str, paths)]))
    return signals.exit_status or int(bool(problem) or not all_held(report.verdicts))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program where they are wrong, with what to write instead."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=about.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(NAMES)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{known}; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the check itself")
    parser.add_argument("--minutes", type=float, default=8.0, help="the most it may take; default 8")
    parser.add_argument("--name", help="of the files gpu_NAME.*; default: the GPU's name")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("scripts/results"),
        help="folder of the files, gpu_NAME.txt, .json and .md (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    for each in options.parts:
        if each not in NAMES:
            parser.error(f"part {each!r} does not exist: write some of {known}")
    options.parts = options.parts or [*NAMES]
    if not 0.5 <= options.minutes <= 120:
        parser.error(f"--minutes {options.minutes:g}: write 0.5 to 120")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu is for trying the check itself: write --device cpu --small")
    if options.device == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else ", which is built without CUDA,"
        parser.error(
            f"torch {torch.__version__}{built} sees no GPU: --device cpu --small tries the check itself"
        )
    if options.name and Path(options.name).name != options.name:
        parser.error(
            f"--name {options.name}: write a name for files, without a folder; --out DIR is the folder"
        )
    try:
        _check_folder(options.out)
    except OSError as error:
        parser.error(f"--out {options.out}: no file can be written there: {error}")
    return options


def _check_folder(folder: Path) -> None:
    """Raises OSError if the folder can't hold the files. Better now than after eight minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE))
        file.flush()


def _run(options: argparse.Namespace, signals: Interruption) -> Report:
    # Without a terminal rich shows no progress. The report is printed afterwards in any case.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[found]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, found="")

        def say(title: str, found: str) -> None:
            progress.update(task, description=title, found=found[:80])

        return check(
            options.parts,
            device=options.device,
            is_small=options.small,
            minutes=options.minutes,
            say=say,
            signals=signals,
        )
