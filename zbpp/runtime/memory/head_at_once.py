"""The head at once: W of a language model's head runs at the end of its B, and does not wait.

    without   B0: dz0 in the logits' memory ... B1: dz1 ... B2: dz2 ... W0 W1 W2    as many dz as W's wait
    with      B0 + W0 of the head ... B1 + W1 of the head ... W0 W1 W2 of the rest  one dz

dz, the gradient of the logits, is mostly the largest tensor that waits for a W on the last rank: 2 GiB with
128k words and 8,192 tokens. B takes longer by this part of W, and W is shorter. So a plan needs nothing new:
the costs of the last stage say both, and all else that waits fills bubbles as before. The order of sums
stays, since B's ascend in microbatch as W's do.
"""

from __future__ import annotations

from collections.abc import Mapping

from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.rank import Rank
from zbpp.schedule import Program
from zbpp.schedule.passes.head_w import with_head_w
from zbpp.schedule.program import HeadW


class HeadAtOnce(Feature):
    """Runs the W of a language model's head at the end of its B.

    The head is what `zbpp.linear_cross_entropy`, or the loss of gpt, llama and Hugging Face models, computes
    logits with on the last stage. Losses and gradients stay equal, to the last bit. Where one compiled call
    holds the head and other layers, all their W's run at the end of B. Nothing changes for other losses.
    """

    name = "head_at_once"

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._workers, self._last = rank.workers, rank.timetable.num_stages - 1

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        return with_head_w(program, self._last)

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        return {HeadW: self._run_w}

    def _run_w(self, at: HeadW) -> None:
        worker = self._workers[at.stage]
        worker.accumulate(worker.deferred(at.microbatch).take_large())
