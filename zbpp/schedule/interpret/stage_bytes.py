"""The bytes of one stage, and how each memory switch changes them. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbpp.schedule.timetable import Op
from zbpp.schedule.units import Unit

Rises = tuple[float, float, float, float]  # by Op


@dataclass(frozen=True, kw_only=True)
class MicrobatchBytes:
    """The bytes that one microbatch takes on a stage, in the order in which F, B and W need them.

    saved, deferred: held between F and B, and between B and W; messages are not counted.
    x, g: the received input, and the received gradient of the output. x_until, g_until: the op after which
        nothing refers to x, or g, any more.
    x_on_way, g_on_way: the same message on its way, where it has another form there (OnMessage); None: it has
        the form in which the stage takes it.
    sent_x, sent_g: the output, and the gradient of the input, without storages that the stage itself keeps.
    rises: for each Op, the most bytes while it runs, above the level before it.
    """

    saved: float = 0.0
    deferred: float = 0.0
    x: float = 0.0
    g: float = 0.0
    x_on_way: float | None = None
    g_on_way: float | None = None
    sent_x: float = 0.0
    sent_g: float = 0.0
    x_until: Op = Op.B
    g_until: Op = Op.B
    rises: Rises = (0.0, 0.0, 0.0, 0.0)

    def received(self, name: str) -> tuple[float, Op]:
        """(bytes, the op after which nothing refers to it) of a received x or g."""
        return (self.x, self.x_until) if name == "x" else (self.g, self.g_until)

    def on_way(self, name: str) -> float | None:
        """x_on_way or g_on_way."""
        return self.x_on_way if name == "x" else self.g_on_way


@dataclass(frozen=True, kw_only=True)
class StageBytes(MicrobatchBytes):
    """The bytes of one stage: those of one microbatch (the fields of MicrobatchBytes), and the stage's own.

    slices: with sequences in slices, the bytes of each slice, in place of the microbatch's.
    past: the keys and values that the slices of a microbatch share, held from F to B of its first slice.
        past_gradients: the sums of their gradients, held from B of its last slice on.
    leaves: how many of the bytes `saved` may leave the device (memory.offload).
    weights, optimizer: held all the time. gradients: held from the first W of a step on; if keeps_gradients,
        all the time.
    gathered: the whole weights that are gathered from shards, held from the first F of a step; 0 without
        shards. reduced: the gradients' bytes after their reduction; None: no reduction changes them.
    update: the optimizer's temporary bytes. copies: post-validation's copies, held from the update to the
        next step's gate.
    releases: whether the stage releases its gradients: behind its last W, or if `reduced` is given, at the
        end of the step.
    block: with offloaded weights, the bytes of the largest block. A rank has two device buffers of the size
        of its largest block. host: the bytes in host memory, held all the time.
    """

    weights: float
    slices: tuple[MicrobatchBytes, ...] = ()
    past: float = 0.0
    past_gradients: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    leaves: float = 0.0
    gathered: float = 0.0
    reduced: float | None = None
    keeps_gradients: bool = False
    update: float = 0.0
    copies: float = 0.0
    releases: bool = False
    block: float = 0.0
    host: float = 0.0

    @property
    def static(self) -> float:
        """Bytes that are there whatever the schedule is: weights, gradients and the optimizer's."""
        return self.weights + self.gathered + self.gradients + self.optimizer

    def of(self, unit: int) -> MicrobatchBytes:
        """The bytes of a unit: of a slice with this number, or of any microbatch."""
        return self.slices[unit.slice] if isinstance(unit, Unit) else self


def sharded(
    stage: StageBytes, *, weights: float, gradients: float, optimizer: float, gathered: float, block: float
) -> StageBytes:
    """The stage with its weights cut into shards. weights, gradients, optimizer: the bytes of one shard.

    gathered: the bytes of the whole weights in the compute dtype; 0: weights are gathered block by block, at
    most two blocks at a time. block: the bytes of the largest block.
    """
    extra = 2 * block if not gathered else 0.0

    def gathering(rises: Rises) -> Rises:
        f, b, w, whole = rises
        return f + extra, b + extra, w, whole + extra

    return replace(
        stage,
        weights=weights,
        optimizer=optimizer,
        gathered=gathered,
        reduced=gradients,
        keeps_gradients=False,
        rises=gathering(stage.rises),
        slices=tuple(replace(each, rises=gathering(each.rises)) for each in stage.slices),
    )


def weights_on_host(stage: StageBytes, *, parameters: float, block: float) -> StageBytes:
    """The stage with weights, gradients and optimizer states in host memory.

    parameters: the bytes of all weights. block: the bytes of the largest block in a buffer. The device holds
    gradients from the stage's first W of a step to its last one (an upper bound for one microbatch).
    """
    return replace(
        stage,
        weights=max(0.0, stage.weights - parameters),
        optimizer=0.0,
        update=0.0,
        releases=True,
        block=block,
        host=parameters + stage.gradients + stage.optimizer,
    )


def released(stage: StageBytes, *, is_shared: bool) -> StageBytes:
    """The stage under memory.gradient_release, which drops its gradients as soon as it is updated.

    is_shared: whether there are replicas or shards; gradients are then complete at the end of a step.
    """
    reduced = stage.gradients if is_shared and stage.reduced is None else stage.reduced
    return replace(stage, releases=True, reduced=reduced)


def validated_later(stage: StageBytes, *, trained: float, copies_gradients: bool = False) -> StageBytes:
    """The stage under post-validation.

    trained: the bytes of the weights that the optimizer changes. copies_gradients: whether an update changes
    gradients in place, to divide a loss scale out of them, say; then they are copied, too.
    """
    copies = trained + stage.optimizer + (stage.gradients if copies_gradients else 0.0)
    return replace(stage, copies=copies)
