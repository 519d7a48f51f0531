"""The head at once: W of a language model's head runs at the end of its B, and does not wait.

    without   B0: dz0 in the logits' memory ... B1: dz1 ... B2: dz2 ... W0 W1 W2    as many dz as W's wait
    with      B0 + W0 of the head ... B1 + W1 of the head ... W0 W1 W2 of the rest  one dz

dz, the gradient of the logits, is mostly the largest tensor that waits for a W on the last rank: 2 GiB with
128k words and 8,192 tokens. B takes longer by the head's W, and W is shorter by it. A plan needs nothing
new: the costs of the last stage contain both changes, and the W of its other weights fills bubbles as before.
The order of sums stays, since B's run in ascending order of microbatches, as W's do.
"""

from __future__ import annotations

from collections.abc import Mapping

from zbpp.features.head_at_once.head_w import HeadW, with_head_w
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.rank import Rank
from zbpp.schedule import Program


class HeadAtOnce(Feature):
    """Runs the W of a language model's head at the end of its B.

    The head is the layer of the last stage whose logits `zbpp.linear_cross_entropy` uses, or the loss of gpt,
    llama and Hugging Face models. Losses and gradients stay equal to the last bit. If one compiled graph
    holds the head and other layers, all their W's run at the end of B. With other losses the extra changes
    nothing.
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
        weight_grads = worker.deferred(at.microbatch)
        worker.run_w(at.microbatch, weight_grads.take(weight_grads.is_large))
