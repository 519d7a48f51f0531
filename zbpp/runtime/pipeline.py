"""Pipeline.step: executes one rank's program, in order. It never chooses.

    timetable --lower--> program --resolve--> [(what to call, with which values)] --run--> .grad

Everything that can be known before the first step is resolved in the constructor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.executor import Executor, Work
from zbpp.runtime.measure import Recorder
from zbpp.runtime.microbatch import split, split_keywords
from zbpp.runtime.stage import Feed, Loss, StageWorker
from zbpp.runtime.world import alone, check_agreement, close_groups, gather, link_groups
from zbpp.schedule import Op, Timetable, lower
from zbpp.seeding import seed_of


class Pipeline:
    """One rank of a pipeline.

    stages: {stage index: module}, exactly those that `timetable` gives to this rank.
    loss_fn(output, target) -> scalar; None if the last stage's module returns the loss.
    group: the pipeline's process group (None: the default one); a pipeline of one rank needs none.
    seed: of the random numbers drawn in forward. timeout: seconds that a wait for another rank may last.
    dynamic_shapes: whether microbatches may differ in what passes between stages (shapes, dtypes, which
    tensors there are); each message then says its own, and takes one more latency.
    Raises ValueError for stages or a group that don't fit the timetable, AgreementError if the
    ranks were given different ones. Collective over the group. As a context manager it closes at the end.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        timetable: Timetable,
        loss_fn: Loss | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        timeout: float = 600.0,
        dynamic_shapes: bool = False,
    ) -> None:
        self.timetable, self.seed, self.num_steps = timetable, seed, 0
        self.recorder: Recorder | None = None
        self.rank = _rank_in(group, timetable)
        self._made_group = alone() if timetable.num_ranks == 1 and group is None else None
        self.group = self._made_group or group
        _check_ranks_agree(timetable, dynamic_shapes, self.group)
        _check_stages(stages, timetable, self.group)
        self.device = _device_of(stages, self.group)
        last = timetable.num_stages - 1
        self._workers = {
            index: StageWorker(
                index, stages[index], is_last=index == last, loss_fn=loss_fn, device=self.device
            )
            for index in timetable.stages_of(self.rank)
        }
        programs, evaluation = lower(timetable), lower(timetable.forward_only())
        self._links = link_groups(group, programs.links, timeout, self.device) if programs.links else {}
        executor = partial(
            Executor,
            workers=self._workers,
            num_stages=timetable.num_stages,
            links=self._links,
            device=self.device,
            dynamic_shapes=dynamic_shapes,
        )
        self._train = executor(programs[self.rank], work=_TRAIN)
        self._evaluate = executor(evaluation[self.rank], work=_EVALUATE)
        self._over = ""  # why there are no more steps

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The modules owned by this rank."""
        return {index: worker.module for index, worker in self._workers.items()}

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """Forward and backward of one whole batch; see `zbpp` for who passes what.

        Tensors are split along dim 0 into microbatches (`zbpp.replicate(tensor)` is not); the owner
        of stage 0 passes args, the owner of the last stage target; kwargs go to every stage
        owned here. Adds to each `.grad` the mean over microbatches, and returns the microbatches'
        losses on the last stage's owner, [] elsewhere.

        Whatever is raised on one of several ranks ends the pipeline: its links close, so that the
        others stop with a CommunicationError. Raises RuntimeError after that, and after `close`.
        """
        with _restored_generators(self.device):
            losses = self._run(self._train, args, target, kwargs, self.recorder)
        self.num_steps += 1
        return losses

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """The forward of one batch in eval mode, without gradients; shapes may differ from step's."""
        self._evaluate.forget_layouts()
        with _restored_generators(self.device), _eval_mode(self.stages), torch.no_grad():
            return self._run(self._evaluate, args, target, kwargs, None)

    def close(self) -> None:
        """Give up the links and process groups that were made for this pipeline; no step follows.

        Modules, gradients and the group that the caller gave stay. Collective: every rank waits here until
        all have come, as none may hang up while another still reads. After a failure, and the second time,
        nobody is waited for. Raises CommunicationError if another rank is gone.
        """
        if self._over:
            return
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if self.timetable.num_ranks > 1:
                gather(None, self.group)
        finally:
            self._end("the pipeline was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._over:
            self._end(f"an error ended the pipeline ({_in_words(error)})")  # others may wait for a message

    def _run(
        self,
        executor: Executor,
        args: tuple[Any, ...],
        target: Any,
        kwargs: dict[str, Any],
        recorder: Recorder | None,
    ) -> list[Tensor]:
        if self._over:
            raise RuntimeError(f"{self._over}: make a new Pipeline")
        try:
            for index, worker in self._workers.items():
                worker.begin(self._feed(index, args, target, kwargs))
            executor.run(recorder)
            losses = [worker.end() for worker in self._workers.values()]
        except BaseException as error:
            self._fail(error)
            raise
        return next((each for each in losses if each), [])

    def _fail(self, error: BaseException) -> None:
        """Drop all that is left of a step; where other ranks are in it, the pipeline ends."""
        for worker in self._workers.values():
            worker.abandon()
        if self.timetable.num_ranks > 1:
            self._end(f"an earlier step failed ({_in_words(error)}), and messages of it are lost")

    def _end(self, why: str) -> None:
        self._over = why
        self._train.close()
        self._evaluate.close()
        close_groups(self._links.values())
        self._links.clear()
        if self._made_group is not None:
            close_groups([self._made_group])
            self._made_group = None

    def _feed(self, stage: int, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any]) -> Feed:
        num = self.timetable.num_microbatches
        if stage == 0 and not (args or kwargs):
            raise ValueError("this rank owns stage 0: pass the batch's inputs to step()")
        inputs = [split(f"argument {i}", value, num) for i, value in enumerate(args)] if stage == 0 else []
        seed = seed_of(self.seed, self.num_steps, stage)
        return Feed(
            args=list(zip(*inputs, strict=True)) if inputs else [()] * num if stage == 0 else (),
            kwargs=split_keywords(kwargs, num),
            targets=None if target is None else split("target", target, num),
            seeds=range(seed, seed + num),
        )


_TRAIN: dict[Op, Work] = {
    Op.F: StageWorker.forward,
    Op.B: StageWorker.backward_input,
    Op.W: StageWorker.backward_weight,
    Op.BW: StageWorker.backward,
}
_EVALUATE: dict[Op, Work] = {Op.F: StageWorker.evaluate}


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _rank_in(group: dist.ProcessGroup | None, timetable: Timetable) -> int:
    if timetable.num_ranks == 1 and group is None:
        return 0
    if not dist.is_initialized():
        raise ValueError(
            f"the timetable is for {timetable.num_ranks} ranks, but there is no process group: start the job "
            "with torchrun and call torch.distributed.init_process_group, or plan for one rank"
        )
    size = dist.get_world_size(group)
    if size != timetable.num_ranks:
        raise ValueError(f"the timetable is for {timetable.num_ranks} ranks, the process group has {size}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the process group that it was given for the pipeline")
    return rank


def _check_ranks_agree(timetable: Timetable, dynamic_shapes: bool, group: dist.ProcessGroup | None) -> None:
    digest = hashlib.sha256(str(timetable).encode()).hexdigest()[:16]
    check_agreement("pipelines", {"dynamic_shapes": dynamic_shapes, "timetable (by hash)": digest}, group)


def _check_stages(
    stages: Mapping[int, nn.Module], timetable: Timetable, group: dist.ProcessGroup | None
) -> None:
    """Every rank looks at all, and raises: none is left waiting for one that went away."""
    for rank, found in enumerate(gather(sorted(stages), group)):
        expected = timetable.stages_of(rank)
        if found != expected:
            raise ValueError(f"rank {rank} owns stages {expected} of this timetable, got modules for {found}")


def _device_of(stages: Mapping[int, nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """Where the stages' tensors are; for stages without any, where the group's messages go."""
    tensors = (tensor for module in stages.values() for tensor in (*module.parameters(), *module.buffers()))
    on_cuda = dist.is_initialized() and "nccl" in dist.get_backend(group)
    default = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return next((tensor.device for tensor in tensors), default)


@contextmanager
def _restored_generators(device: torch.device) -> Iterator[None]:
    """What a step draws is seeded by its place; the caller's own random numbers go on undisturbed."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def _eval_mode(stages: Mapping[int, nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for stage in stages.values() for module in stage.modules()]
    for stage in stages.values():
        stage.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
