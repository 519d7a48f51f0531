"""The command `zbpp`, also called as `python -m zbpp`: passes the arguments to one of zbpp/commands/."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from zbpp import __version__

COMMANDS = {
    "plan": "choose, print, compare and draw timetables; needs no GPU",
    "train": "train a model in a pipeline",
    "bench": "time schedules and runtimes on one model, in turns",
    "measure": "measure what a model's stages and messages cost on this machine",
    "memory": "predict what each rank will hold, and what each switch would save",
    "explain": "show which weight gradients of a stage wait for W, and why others do not",
    "export": "write a run's model as a folder that Hugging Face's transformers loads",
    "hang": "show where each rank stood when a call failed or waited in vain",
    "compare": "compare finished runs: are their losses equal to the last bit?",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command with the arguments that follow its name; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"zbpp {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}: write {_choices()}", file=sys.stderr)
        return 2
    # Imported only now: `zbpp plan` starts without torch, and --help without anything.
    try:
        return int(import_module(f"zbpp.commands.{name}").main(given[1:]) or 0)
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _help() -> str:
    lines = [f"  {name:<9} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: zbpp COMMAND ...",
            "",
            "Zero-bubble pipeline-parallel training for PyTorch.",
            "",
            *lines,
            "",
            "zbpp COMMAND --help explains a command; zbpp --version prints the version.",
            "On several machines: torchrun ... -m zbpp.train, with the arguments of zbpp train.",
        ]
    )


def _choices() -> str:
    *names, last = COMMANDS
    return f"{', '.join(names)} or {last}"


if __name__ == "__main__":
    sys.exit(main())
