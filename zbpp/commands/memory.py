"""Predict what each rank will hold, before anything runs, and what each switch would save and cost.

    zbpp memory -n 4 schedule=zb_h1 model=llama_tiny
    zbpp memory -n 8 schedule=zb_v model=llama_1b precision=mixed_bfloat16 microbatch_size=1 memory.limit=16

Takes the arguments of `zbpp train` and starts no rank: stages are built on fake tensors, without memory.
memory.limit=16: the GiB of each rank's device. Prints what doesn't fit, and which switches make it fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbpp.commands import command_line
from zbpp.config import Composed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `zbpp memory`; arguments None: those of this process."""
    command_line.run(_memory, "train", __doc__, arguments)


def _memory(composed: Composed) -> None:
    from zbpp.prediction.switches import memory_text  # torch: --help and --cfg do without

    for number, part in enumerate(memory_text(composed.tree)):
        print(part if number == 0 else f"\n{part}", flush=True)
