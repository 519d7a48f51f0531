"""The bytes of one stage, and what a switch of memory makes of them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbpp.schedule.timetable import Op


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """The bytes of one stage. Per microbatch unless said otherwise.

    Held all the time: weights, optimizer. From the first W of a step: gradients, or all the time if
    keeps_gradients. gathered: the whole weights of shards, from the first F of a step; 0 without shards.
    reduced: what is left of the gradients after their reduction; None: all.
    saved, deferred: without messages. leaves: what of `saved` may leave the device (memory.offload);
    deferred_leaves: what of `deferred` may.
    x, g: the received input, and the received gradient of the output.
    x_until, g_until: the op after which nothing refers to them any more. sent_x, sent_g: the output and the
    input's gradient, as far as the stage itself doesn't keep them. rises: what an op needs above the level
    before it, at most. update: what the optimizer needs above its states, for a while.
    copies: of what an update changes, all the time, so that the update can be taken back.
    releases: whether the stage is updated behind its last W, and its gradients go.
    block: weights of the largest block, where weights live on the host; a rank has two buffers of the largest
    block of its stages, or as many as a budget allows (`num_buffers`). num_blocks, budget: for that.
    on_host: bytes of weights on the host. host: all bytes there, all the time.
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    saved: float = 0.0
    deferred: float = 0.0
    leaves: float = 0.0
    deferred_leaves: float = 0.0
    x: float = 0.0
    g: float = 0.0
    sent_x: float = 0.0
    sent_g: float = 0.0
    x_until: Op = Op.B
    g_until: Op = Op.B
    gathered: float = 0.0
    reduced: float | None = None
    keeps_gradients: bool = False
    rises: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # by Op
    update: float = 0.0
    copies: float = 0.0
    releases: bool = False
    block: float = 0.0
    num_blocks: int = 0
    budget: float | None = None
    on_host: float = 0.0
    host: float = 0.0

    @property
    def static(self) -> float:
        """Bytes that are there whatever the schedule is: weights, gradients and the optimizer's."""
        return self.weights + self.gathered + self.gradients + self.optimizer


def sharded(
    stage: StageBytes, *, weights: float, gradients: float, optimizer: float, gathered: float, block: float
) -> StageBytes:
    """The stage with its weights cut into shards; weights, gradients, optimizer: a shard's bytes.

    gathered: the whole weights, as they compute, while a step runs. block: of the largest block; where
    `gathered` is 0, weights are gathered block by block, two at a time at most: this one and the next.
    """
    extra = 2 * block if not gathered else 0.0
    f, b, w, whole = stage.rises
    return replace(
        stage,
        weights=weights,
        optimizer=optimizer,
        gathered=gathered,
        reduced=gradients,
        keeps_gradients=False,
        rises=(f + extra, b + extra, w, whole + extra),
    )


def weights_on_host(
    stage: StageBytes, *, parameters: float, block: float, num_blocks: int, budget: float | None = None
) -> StageBytes:
    """The stage with weights, gradients and the optimizer's states on the host.

    parameters: bytes of all weights, as they lie on the host; block: of those of the largest block;
    budget: what a rank's device may hold of weights and their gradients; None: the least.
    During a W the device holds one block's gradients.
    """
    f, b, w, whole = stage.rises
    moved = parameters + stage.gradients + stage.optimizer
    return replace(
        stage,
        weights=max(0.0, stage.weights - parameters),
        gradients=0.0,
        optimizer=0.0,
        update=0.0,
        block=block,
        num_blocks=num_blocks,
        budget=budget,
        on_host=parameters,
        host=moved,
        rises=(f, b, w + block, whole + block),
    )


def released(stage: StageBytes, *, is_shared: bool) -> StageBytes:
    """The stage whose gradients go as soon as it is updated (gradient_release=step).

    is_shared: with replicas or shards, whose gradients are complete at the end of a step.
    """
    reduced = stage.gradients if is_shared and stage.reduced is None else stage.reduced
    return replace(stage, releases=True, reduced=reduced)


def validated_later(stage: StageBytes, *, trained: float, is_exact: bool) -> StageBytes:
    """The stage whose update may be taken back; trained: bytes of the weights that the optimizer changes.

    is_exact: by copies of weights and the optimizer's states; or else it is computed.
    """
    return replace(stage, copies=(trained + stage.optimizer) if is_exact else 0.0)


def num_buffers(stages: Sequence[StageBytes]) -> int:
    """How many buffers of the largest block a rank with these stages has; as the runtime decides."""
    largest, budget = max(each.block for each in stages), stages[0].budget
    if budget is None or not largest:
        return 2
    return max(2, min(sum(each.num_blocks for each in stages), int(budget // largest) - 1))
