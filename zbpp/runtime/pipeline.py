"""Pipeline.step: executes one rank's program, in order. It never chooses.

    timetable --lower--> program --resolve--> [(what to call, with which values)] --run--> .grad

Everything that can be known before the first step is resolved in the constructor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.calls import Calls
from zbpp.runtime.checks import check_ranks_agree, check_stages, rank_in, timetable_of
from zbpp.runtime.executor import Executor, Work
from zbpp.runtime.measure import Recorder
from zbpp.runtime.microbatch import Cutter
from zbpp.runtime.outputs import Metrics, Outputs
from zbpp.runtime.parameters import StageParameters
from zbpp.runtime.restored import GradientsBefore, eval_mode, restored_generators
from zbpp.runtime.stage import Feed, Loss, Observe, StageWorker
from zbpp.runtime.world import (
    CommunicationError,
    alone,
    close_groups,
    gather,
    link_groups,
    store_of_the_job,
)
from zbpp.schedule import Op, Timetable, lower
from zbpp.seeding import seed_of


class Pipeline:
    """One rank of a pipeline.

    stages: {stage index: module}, exactly those that `timetable` gives to this rank. Stages of one rank may
    share parameters. A stage whose parameter is tied to another stage's may declare it, in names of the whole
    model: `tied_parameters = {"head.weight": "embedding.weight"}`.
    timetable: or the name of a schedule, planned for the ranks of the group and num_microbatches.
    loss_fn(output, target) -> scalar; None if the last stage's module returns the loss.
    group: the pipeline's process group (None: the default one); a pipeline of one rank needs none.
    seed: of the random numbers drawn in forward. timeout: seconds that a wait for another rank may last.
    dynamic_shapes: whether microbatches may differ in what passes between stages (shapes, dtypes, which
    tensors there are); each message then says its own, and takes one more latency.
    Raises TypeError or ValueError for stages or a group that don't fit the timetable, and for stages that are
    wrapped in DistributedDataParallel or FSDP or declared to be tied across ranks; AgreementError if ranks
    were given different ones. Collective over the group. As a context manager it closes at the end.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        timetable: Timetable | str | None = None,
        loss_fn: Loss | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        num_microbatches: int | None = None,
        seed: int = 0,
        timeout: float = 600.0,
        dynamic_shapes: bool = False,
    ) -> None:
        self.timetable = timetable = timetable_of(timetable, num_microbatches, group)
        self.seed, self.num_steps = seed, 0
        self.recorder: Recorder | None = None
        self.rank = rank_in(group, timetable)
        self._made_group = alone() if timetable.num_ranks == 1 and group is None else None
        self.group = self._made_group or group
        check_ranks_agree(timetable, dynamic_shapes, self.group)
        agreed = check_stages(stages, timetable, self.group)
        self._parameters = StageParameters(stages, agreed.names)
        self._loss_fn = loss_fn
        self.device = _device_of(stages, self.group)
        self._last = timetable.num_stages - 1
        self._workers = {
            index: StageWorker(
                index, stages[index], is_last=index == self._last, loss_fn=loss_fn, device=self.device
            )
            for index in timetable.stages_of(self.rank)
        }
        programs, evaluation = lower(timetable), lower(timetable.forward_only())
        ends = {timetable.rank_of[0], timetable.rank_of[-1]}  # inputs and targets are of one batch
        watched = [{*each} for each in (*programs.links, ends) if self.rank in each]
        self._calls: Calls | None = None
        if programs.links:
            store = store_of_the_job(agreed.key)
            self._calls = Calls(store, self.rank, set().union(*watched) - {self.rank}, self.device)
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

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once: what its optimizer takes."""
        return (parameter for _, parameter in self._parameters.named())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the names that they have in the whole model: the stage modules' own.

        Where two stages of the pipeline use one name for different tensors, every name on every rank begins
        with `stages.{index}.`.
        """
        return self._parameters.named()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers of this rank's stages, under those names."""
        return self._parameters.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dict, which may be the whole model's.

        Raises RuntimeError, before anything is loaded, if a name of this rank is missing or one belongs to no
        stage of the pipeline; not if strict=False.
        """
        self._parameters.load_state_dict(state_dict, strict=strict)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """Forward and backward of one whole batch; see `zbpp` for who passes what.

        Tensors, also those in tuples, lists and dicts, are split along dim 0 into microbatches
        (`zbpp.replicate(tensor)` is not); the owner of stage 0 passes args, the owner of the last stage
        target; kwargs go to every stage owned here. Adds to each `.grad` the mean over microbatches, and
        returns the microbatches' losses on the last stage's owner, [] elsewhere.

        A tensor that requires grad gets its gradient after the last W: in its `.grad`, or by the backward of
        what it was computed from, which frees that graph. It is the gradient through this rank's stages; a
        tensor that several ranks pass as a keyword has its gradient in parts, one on each.

        Whatever is raised on one of several ranks ends the pipeline: its links close, so that the others
        stop with a CommunicationError. Raises RuntimeError after that, and after `close`; AgreementError if
        another rank is in `evaluate`, or was given another number of rows. After an error num_steps is what
        it was; on each rank that was still in the step, a `.grad` that was None is None again. To one that
        was there, a part of the step may have been added: the error says so, and step refuses until that
        gradient was zeroed or dropped. What forward did to buffers (BatchNorm's statistics) and hooks did to
        anything is not undone.
        """
        with restored_generators(self.device):
            losses = self._run(self._train, args, target, kwargs)
        self.num_steps += 1
        return losses

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> Any:
        """The forward of one batch in eval mode, without gradients; shapes may differ from step's.

        Returns losses as `step` does; (losses, outputs) with return_outputs, (losses, metrics) with metrics,
        (losses, outputs, metrics) with both, which then need no target: without one there are no losses.
        outputs: what the last stage returned, microbatches concatenated along dim 0; None on other ranks.
        metrics(output, target) -> {name: number}, called per microbatch; the means over all rows, {} on other
        ranks.
        """
        self._evaluate.forget_layouts()
        seen = Outputs(is_kept=return_outputs, metrics=metrics) if return_outputs or metrics else None
        with (
            restored_generators(self.device),
            eval_mode([*self.stages.values(), self._loss_fn]),
            torch.no_grad(),
        ):
            losses = self._run(self._evaluate, args, target, kwargs, seen.take if seen else None)
        if seen is None:
            return losses
        return (losses, *([seen.whole()] if return_outputs else []), *([seen.metrics()] if metrics else []))

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
        observe: Observe | None = None,
    ) -> list[Tensor]:
        if self._over:
            raise RuntimeError(f"{self._over}: make a new Pipeline")
        is_step, before = executor is self._train, None
        try:
            cutter = Cutter(self.timetable.num_microbatches)
            feeds = self._feeds(cutter, args, target, kwargs, observe)
            if self._calls is not None:
                self._calls.begin("step" if is_step else "evaluate", cutter.rows)
            before = GradientsBefore(self._trained()) if is_step else None
            for worker, feed in zip(self._workers.values(), feeds, strict=True):
                worker.begin(feed)
            executor.run(self.recorder if is_step else None)
            losses = [worker.end() for worker in self._workers.values()]
            cutter.backward()
        except BaseException as error:
            self._fail(error, before)
            raise
        return next((each for each in losses if each), [])

    def _trained(self) -> Iterator[nn.Parameter]:
        """The parameters that a step of this rank may add gradients to."""
        of_loss = self._loss_fn.parameters() if isinstance(self._loss_fn, nn.Module) else ()
        return chain(self.parameters(), of_loss)

    def _fail(self, error: BaseException, before: GradientsBefore | None) -> None:
        """Drop all that is left of a call; where other ranks are in it, the pipeline ends."""
        for worker in self._workers.values():
            worker.abandon()
        left = "" if before is None else before.restore()
        if left:
            error.add_note(left)
        if self.timetable.num_ranks > 1:
            self._end(f"an earlier step failed ({_in_words(error)}), and messages of it are lost")
        if isinstance(error, CommunicationError) and self._calls is not None:
            with suppress(CommunicationError):  # the store may be gone, too
                self._calls.check()  # whether another call is why the other rank hung up

    def _end(self, why: str) -> None:
        self._over = why
        self._train.close()
        self._evaluate.close()
        close_groups(self._links.values())
        self._links.clear()
        if self._made_group is not None:
            close_groups([self._made_group])
            self._made_group = None

    def _feeds(
        self,
        cutter: Cutter,
        args: tuple[Any, ...],
        target: Any,
        kwargs: dict[str, Any],
        observe: Observe | None,
    ) -> list[Feed]:
        """What each stage of this rank gets, cut into microbatches."""
        if 0 in self._workers and not (args or kwargs):
            raise ValueError("this rank owns stage 0: pass the batch's inputs to step()")
        num, is_last_here = self.timetable.num_microbatches, self._last in self._workers
        inputs = [cutter.cut(f"argument {i}", each) for i, each in enumerate(args) if 0 in self._workers]
        keywords = cutter.cut_keywords(kwargs)
        targets = cutter.cut("target", target) if is_last_here and target is not None else None
        feeds = []
        for stage in self._workers:
            seed = seed_of(self.seed, self.num_steps, stage)
            feeds.append(
                Feed(
                    args=(list(zip(*inputs, strict=True)) or [()] * num) if stage == 0 else (),
                    kwargs=keywords,
                    targets=targets,
                    seeds=range(seed, seed + num),
                    observe=observe,
                )
            )
        return feeds


_TRAIN: dict[Op, Work] = {
    Op.F: StageWorker.forward,
    Op.B: StageWorker.backward_input,
    Op.W: StageWorker.backward_weight,
    Op.BW: StageWorker.backward,
}
_EVALUATE: dict[Op, Work] = {Op.F: StageWorker.evaluate}


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _device_of(stages: Mapping[int, nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """Where the stages' tensors are; for stages without any, where the group's messages go."""
    tensors = (tensor for module in stages.values() for tensor in (*module.parameters(), *module.buffers()))
    on_cuda = dist.is_initialized() and "nccl" in dist.get_backend(group)
    default = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return next((tensor.device for tensor in tensors), default)
