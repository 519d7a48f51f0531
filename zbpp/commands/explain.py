"""Print for each weight of one stage whether W or B makes its gradient, and why.

    zbpp explain model=llama_tiny num_stages=4 stage=1
    zbpp explain model=mlp data=regression num_stages=2 stage=0
    zbpp explain model=gpt_tiny stage=1 compile=stage

Builds the stage and the stages before it, and runs one microbatch forward; needs no GPU and no torchrun.
compile=stage and compile=layer work as in `zbpp train`; what can't be compiled is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbpp.commands import command_line
from zbpp.config import Composed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `zbpp explain`; arguments None: those of this process."""
    command_line.run(_explain, "explain", __doc__, arguments)


def _explain(config: Composed) -> None:
    from zbpp.run.explain_stage import explain_stage  # torch: --help and --cfg do without

    print(explain_stage(config.tree))
