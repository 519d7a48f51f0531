"""Pipeline: what a user calls. It executes a plan and never chooses.

    timetable --lower--> program --resolve--> [(what to call, with which messages)] --run--> .grad

Everything that can be known before the first step is done in the constructor. Calls are run by the Rank
(rank.py), which also says what happens when a rank fails. All else is done by extras (extra.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.devices import restored_generators, synchronize
from zbpp.error_text import error_text
from zbpp.job.agreement import gather, refuse_together
from zbpp.runtime.arguments import (
    agree_on_stages,
    check_ranks_agree,
    device_of,
    may_compile,
    model_of,
    rank_in,
    timetable_of,
)
from zbpp.runtime.call.feed import Call, Metrics, Observe, named_target
from zbpp.runtime.call.results import NamedLosses, Result, summed
from zbpp.runtime.call.weights import Count
from zbpp.runtime.extra import EMPTY_MICROBATCHES, Extra
from zbpp.runtime.parameters import StageParameters
from zbpp.runtime.processes.dtensors import is_counted
from zbpp.runtime.processes.groups import close_groups, group_of_this_process, set_timeout
from zbpp.runtime.processes.mesh import EXPERT, SHARD, MeshPosition, Reshard
from zbpp.runtime.processes.ties import copies_here
from zbpp.runtime.rank import Rank
from zbpp.runtime.restored import eval_mode
from zbpp.runtime.stage import Loss
from zbpp.schedule import Timetable
from zbpp.schedule.slice_bounds import bounds_for
from zbpp.seeding import seed_of
from zbpp.stage_api import PipelineModel, check_pipeline, target_names
from zbpp.tracebacks import hiding_own_frames

AnExtra = TypeVar("AnExtra", bound=Extra)

_OF_MODULE = (
    ", since it is no nn.Module: write pipeline.step(x, target=y) to train, pipeline.evaluate or predict for "
    "eval mode, Pipeline(..., device=...) for a device, and pipeline.stages for this rank's modules"
)


class Pipeline:
    """One rank of a pipeline.

    stages: {stage index: module}, exactly those that `timetable` gives to this rank; or a model (see
    zbpp/stage_api.py), which then builds them. Stages of one rank may share parameters. A stage whose
    parameter is tied to another rank's declares it: `tied_parameters = {"head.weight": "embedding.weight"}`
    (see there). Each rank has a copy: all begin with the values of the first stage's, and get the sum of all
    gradients.
    timetable: a Timetable; or the name of a schedule, which is then planned for the ranks of the group and
    num_microbatches. slice_bounds: with a timetable that has slices, the tokens at which they begin, and the
    length of every sequence, as [0, 4096, 7168, 8192] for three slices; see zbpp.planning.balanced_bounds.
    Sequences in `per_microbatch` may have other lengths, and are cut at the same shares.
    loss_fn(output, target) -> scalar. None: the model's loss; without a model, the last stage's module
    returns the loss.
    group: the pipeline's process group (None: the default one); a pipeline of one rank needs none.
    mesh: a DeviceMesh with a dimension "pipeline", and "replicate", "shard", "context", "tensor" as wanted,
    instead of group; see zbpp.make_mesh. The processes of one pipeline differ in the first dimension alone.
    Replicas and shards are given different rows; all that hold a copy of a parameter get the mean of its
    gradients. Processes of one context group are given the same rows, whole, of which each computes a part of
    each sequence (zbpp/features/context/context.py); losses and outputs are those of whole sequences. If
    the mesh was made with expert=, experts are spread here (zbpp/features/experts/experts.py). With shards,
    plain stages are wrapped in fully_shard here: make the optimizer afterwards, of `parameters()`.
    reshard: when gathered weights of sharded stages are freed: "step", after a stage's last W; "microbatch",
    after each F and each B, and then they are gathered twice per microbatch.
    mp_policy: the torch.distributed.fsdp.MixedPrecisionPolicy of the stages that the Pipeline shards.
    extras: what the pipeline does beside running its program, see extra.py; the same on all ranks.
    seed: of the random numbers drawn in forward. timeout: seconds that a wait for another rank may last;
    in a step that may compile half an hour, if that is longer.
    dynamic_shapes: whether messages between stages may differ otherwise than with the shapes of the inputs
    (shapes, dtypes, which tensors there are); each message then says its layout, and takes one more latency.
    device: where a model's stages go (None: this process's CUDA device if the group is NCCL's, else the CPU);
    given stages stay where they are, and those without tensors go with the other ranks' stages.

    num_steps: how many steps are done. The random numbers of the next step depend on it: set it to go on with
    a run that was saved.
    step_losses, evaluation_losses: this rank's part of the named losses of the last step and evaluation.
    loss_scale: a factor on all gradients that `step` computes, 1.0 until it is set; the losses that `step`
    returns don't have it. With float16 it keeps small gradients above zero; whoever sets it divides it out.

    Raises TypeError or ValueError for stages, a group or a mesh that don't fit the timetable, for stages in
    DistributedDataParallel, and for stages in FSDP that aren't sharded over this mesh; AgreementError if
    ranks were given different timetables, or different values of another argument that they must share.
    Collective over the group or the mesh. As a context manager it closes at the end.
    """

    standard_extras: ClassVar[Callable[[Rank, Reshard, Any], Iterable[Sequence[Extra]]]]
    """Those of every pipeline, see features/standard.py. The package sets it: the core knows no extra."""

    @hiding_own_frames
    def __init__(
        self,
        stages: Mapping[int, nn.Module] | PipelineModel,
        timetable: Timetable | str | None = None,
        loss_fn: Loss | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: DeviceMesh | None = None,
        num_microbatches: int | None = None,
        slice_bounds: Sequence[int] = (),
        seed: int = 0,
        timeout: float = 600.0,
        dynamic_shapes: bool = False,
        device: torch.device | str | None = None,
        reshard: Reshard = "step",
        mp_policy: Any = None,
        extras: Iterable[Extra] = (),
    ) -> None:
        given = MeshPosition(mesh, group)
        for each in given.mesh_groups():
            set_timeout(each, timeout)
        check_ranks_agree(
            timetable,
            num_microbatches,
            given,
            slice_bounds=str(slice_bounds),  # whatever it is: what is no bounds is refused below
            seed=seed,
            dynamic_shapes=dynamic_shapes,
            reshard=reshard,
        )
        self.timetable = timetable_of(timetable, num_microbatches, given)
        self.slice_bounds = bounds_for(self.timetable, slice_bounds)
        self.rank = rank_in(given.pipeline, self.timetable)
        self.seed, self.loss_scale, self._running = seed, 1.0, Lock()
        self._timeout, self._dynamic_shapes, self._reshard = timeout, dynamic_shapes, reshard
        self.step_losses, self.evaluation_losses = NamedLosses(), NamedLosses()
        self._take_place(given)
        self._rank = self._made_rank(stages, loss_fn, device, given.pipeline)
        try:
            self._take_extras(extras, mp_policy)
            check_pipeline(model_of(stages), self)
        except BaseException as error:
            self.end(f"it could not be made ({error_text(error)})")
            raise

    def _take_place(self, given: MeshPosition) -> None:
        """Take the place in the mesh or group that was given."""
        # One rank of a larger job needs a group, too, for what is collective; this pipeline closes it.
        is_alone = self.timetable.num_ranks == 1 and given.pipeline is None
        self._made_group = group_of_this_process() if is_alone else None
        self.place = given if self._made_group is None else MeshPosition(None, self._made_group)
        self.group = self.place.pipeline

    def _made_rank(
        self,
        stages: Mapping[int, nn.Module] | PipelineModel,
        loss_fn: Loss | None,
        device: torch.device | str | None,
        group: dist.ProcessGroup | None,
    ) -> Rank:
        """Agree with all ranks, take this rank's stages, and make its Rank. Collective.

        group: for its links.
        """
        options: dict[str, Any] = {"dynamic_shapes": self._dynamic_shapes, "slice_bounds": self.slice_bounds}
        agreed = agree_on_stages(stages, self.timetable, self.rank, device, self.place)
        model = model_of(stages)
        self._loss_fn = model.loss if loss_fn is None and model is not None else loss_fn
        # Read-only: a module put there later would not be run.
        self.stages = MappingProxyType(dict(sorted(agreed.stages.items())))
        loss_here = self._loss_fn if self.timetable.rank_of[-1] == self.rank else None
        self._parameters = StageParameters(self.stages, agreed.names, agreed.ties, self.group, loss_here)
        self.device = device_of(self.stages.values(), self.group, device, agreed.kinds)
        return Rank(
            self.timetable,
            self.rank,
            self.stages,
            self._loss_fn,
            self.device,
            self.place,
            group=group,
            key=agreed.key,
            ties=agreed.ties,
            timeout=self._timeout,
            compiles=any(self.place.gather(any(map(may_compile, self.stages.values())))),
            **options,
        )

    def _take_extras(self, extras: Iterable[Extra], mp_policy: Any) -> None:
        """Take the extras of every pipeline, then those that were given. Collective.

        Raises ValueError on all processes if an extra can't be taken on one of them.
        """
        for some in Pipeline.standard_extras(self._rank, self._reshard, mp_policy):
            self._take(*some)
        self._num_own = len(self._rank.extras)
        copies = copies_here(self._rank.ties, self.stages, self.timetable.rank_of, self.rank)
        self._copies = set(map(id, copies))
        for each in extras:
            self._take(each)

    def _take(self, *extras: Extra) -> None:
        refusal = ""
        try:
            for each in extras:
                self._rank.use(each)
        except ValueError as error:
            refusal = str(error)
        refuse_together(refusal, self.place.gather)

    # ---- Calls

    @hiding_own_frames
    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """Forward and backward of one whole batch. Adds to each `.grad` that of the batch's mean loss.

        args: the batch's inputs, on the owner of stage 0. target: on the owner of the last stage; with a
        model of transformers labels= and shift_labels= do, too (zbpp/models/hf/labels.py). kwargs: for every
        stage owned here. Tensors in them, also inside tuples, lists and dicts, are split along dim 0
        into microbatches, except `zbpp.replicate(tensor)`. `zbpp.per_microbatch([...])` holds microbatches of
        any lengths, in any order; empty ones are left out. Returns the microbatches' losses on the last
        stage's owner, [] elsewhere; their mean is the loss of the batch. The losses have no graph, since
        `step` has run their backward. Each microbatch weighs the same, or each target, if the loss is marked
        by `zbpp.stage_api.mean_over_tokens`.

        A tensor that requires grad gets its gradient after the last W: in its `.grad`, or by the backward of
        what it was computed from, which frees that graph. It is the gradient through this rank's stages; a
        tensor that several ranks pass as a keyword has its gradient in parts, one on each.

        An error on one of several ranks ends the pipeline on all of them. Where another rank waits for a
        message that can't come any more, it stops: on gloo with a CommunicationError at once; on NCCL torch's
        watchdog ends its process at the timeout. Every later call raises RuntimeError, as it does after
        `close`. The first step raises ValueError if tensor-parallel processes computed different losses.
        Raises AgreementError if another rank is in `evaluate`, or was given another number of rows.

        After an error, gradients may hold a part of the failed step, as after a plain backward that fails:
        zero them before the next step. Changes that forward made to buffers are not undone, either.
        """
        with self._one_call():
            call = self._call(
                args,
                target,
                kwargs,
                loss_scale=self.loss_scale,
                slice_bounds=self.slice_bounds,
            )
            result = self._rank.run(call, self.seeds())
        self.step_losses = result.named
        self.num_steps += 1
        return result.losses

    @hiding_own_frames
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
        (losses, outputs, metrics) with both. With either of them the target may be left out: a loss_fn then
        gives no losses, and metrics gets None as the target. outputs: what the last stage returned,
        microbatches concatenated along dim 0, or a list of those that are not empty if they differ in
        another dimension; None on other ranks. metrics(output, target) -> {name: number},
        called per microbatch; the means over all rows, {} on other ranks. With a context dimension it is
        called for this process's part of each sequence, and the means are over all parts.
        """
        return self._evaluate("evaluate", args, target, kwargs, return_outputs, metrics)

    @hiding_own_frames
    def evaluate_as_one(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> Any:
        """`evaluate` of a batch of any number of rows, which is one microbatch."""
        return self._evaluate("predict", args, target, kwargs, return_outputs, metrics)

    def _evaluate(
        self,
        kind: str,
        args: tuple[Any, ...],
        target: Any,
        kwargs: dict[str, Any],
        return_outputs: bool,
        metrics: Metrics | None,
    ) -> Any:
        call = self._call(
            args,
            target,
            kwargs,
            kind=kind,
            slice_bounds=() if kind == "predict" else self.slice_bounds,
            returns_outputs=return_outputs,
            metrics=metrics,
        )
        result = self._evaluated(call)
        self.evaluation_losses = result.named
        found: list[Any] = [result.losses]
        if return_outputs:
            found.append(result.outputs)
        if metrics:
            found.append(result.metrics)
        return tuple(found) if len(found) > 1 else result.losses

    @hiding_own_frames
    def forward(
        self, *args: Any, target: Any = None, observe: Observe | None = None, **kwargs: Any
    ) -> list[Tensor]:
        """The forward of one batch without gradients, in the mode that the modules are in.

        Arguments and losses are those of `evaluate`. observe(output, target) is called by the last stage for
        each microbatch, in order; the target may then be left out.
        """
        how: Any = {"observe": observe, "slice_bounds": self.slice_bounds}
        call = self._call(args, target, kwargs, kind="evaluate", **how)
        result = self._forward(call)
        self.evaluation_losses = result.named
        return result.losses

    @hiding_own_frames
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The last stage's output for a batch of any size, which is one microbatch; None on other ranks.

        As in `evaluate`: in eval mode, without gradients, at any time between steps. No loss is computed.
        """
        return self._evaluated(Call(args, None, kwargs, "predict", returns_outputs=True)).outputs

    def _call(self, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any], **how: Any) -> Call:
        """A call with its target, under whichever name it was given. how: further fields of Call."""
        is_read = self.timetable.num_stages - 1 in self.stages
        target, kwargs = named_target(target_names(self.stages.values()), target, kwargs, is_read=is_read)
        return Call(args, target, kwargs, **how)

    def _evaluated(self, call: Call) -> Result:
        """Run a call in eval mode."""
        return self._forward(call, [*self.stages.values(), self._loss_fn])

    def _forward(self, call: Call, evaluated: Iterable[object] = ()) -> Result:
        """Run a call without gradients. evaluated: the modules among these are in eval mode meanwhile."""
        self.finish_update()
        with self._one_call(), eval_mode(evaluated), torch.no_grad():
            return self._rank.run(call, self.seeds())

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """One call runs at a time, since stages hold its microbatches; the caller's random numbers stay.

        Raises RuntimeError, and changes nothing, if a call runs: in another thread, or around this one.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "this pipeline is in a call already: step, evaluate and predict run one at a time, not in "
                "several threads, and not inside a stage, a loss or a metric of another call"
            )
        try:
            with restored_generators(self.device):
                yield
        finally:
            self._running.release()

    def seeds(self) -> dict[int, int]:
        """Per stage, the seed of its unit 0 in the next step."""
        # Processes that see different tokens draw different numbers.
        part = [self.place.token_part] if self.place.token_part else []
        return {stage: seed_of(self.seed, self.num_steps, stage, *part) for stage in self.stages}

    @property
    def count(self) -> Count | None:
        """How many targets a microbatch has, if the loss is marked by `zbpp.stage_api.mean_over`."""
        return self._rank.count

    def finish_update(self) -> None:
        """Validate the last update, if it is not validated yet; afterwards the weights are final.

        Raises RuntimeError if an update has failed: the weights may then be wrong for good.
        """
        self._rank.finish_update()

    if not TYPE_CHECKING:  # to a type checker, __getattr__ would give the class every name

        @hiding_own_frames
        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            raise TypeError(f"a Pipeline can't be called{_OF_MODULE}")

        @hiding_own_frames
        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property has failed: raise its own error
                object.__getattribute__(self, name)
            raise AttributeError(f"Pipeline has no {name}{_OF_MODULE if hasattr(nn.Module, name) else ''}")

    # ---- Extras

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The extras that the pipeline was given, for good or for a while."""
        return tuple(self._rank.extras[self._num_own :])

    @property
    def released(self) -> Mapping[int, Tensor] | None:
        """The squared norms of the gradients that the last step has dropped; None: gradients stay."""
        return self._rank.released

    def refusal(self, extra: Extra) -> str:
        """Why the pipeline can't use an extra beside those that it has; "" if it can."""
        try:
            self._rank.check(extra)
        except ValueError as error:
            return str(error)
        return ""

    def use(self, extra: Extra) -> None:
        """Use an extra from the next call on. Collective, if the extra is used on all ranks."""
        self._rank.use(extra)

    @contextmanager
    def using(self, extra: AnExtra) -> Iterator[AnExtra]:
        """Use an extra in the calls inside the block. Collective, if the extra is used on all ranks."""
        self._rank.use(extra)
        try:
            yield extra
        finally:
            self._rank.leave(extra)

    # ---- State

    @property
    def num_steps(self) -> int:
        """How many steps are done; see Pipeline."""
        return self._rank.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._rank.num_steps = number

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages and of a loss that is a module, each once: for optimizers."""
        return (parameter for _, parameter in self._parameters.named())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """Those of `parameters` that this process counts: over the mesh, each part of each comes once.

        Replicas count each for itself, unless experts are spread over them.
        """
        mine = (each for each in self.parameters() if id(each) not in self._copies)
        return (each for each in mine if is_counted(each, self.place))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with the names that they have in the whole model: the stage modules' own.

        Where two stages of the pipeline use one name for different tensors, every name on every rank begins
        with `stages.{index}.`.
        """
        return self._parameters.named()

    def parameter_names(self) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
        """`named_parameters` with all names of each; a tied parameter also has those of its other places."""
        return self._parameters.all_names()

    @property
    def has_prefixed_names(self) -> bool:
        """Whether names begin with `stages.{index}.`, see `named_parameters`: then they depend on the cut."""
        return self._parameters.is_prefixed

    def state_dict(self, stage: int | None = None, *, keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and persistent buffers under those names: of one stage, or of all this rank's."""
        self.finish_update()
        return self._parameters.state_dict(stage, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dict, which may be the whole model's.

        Raises RuntimeError, before anything is loaded, if a name of this rank is missing or one belongs to no
        stage of the pipeline; not if strict=False. Copies of a tied parameter on several ranks get the value
        of the first one. Collective if ranks have copies of a tied parameter. All copies of a stage in a mesh
        must be given the same values: zbpp.check_replicas compares them.
        """
        self.finish_update()
        self._parameters.load_state_dict(state_dict, strict=strict)
        self._rank.extras.loaded()

    def auxiliary_losses(self) -> dict[str, float]:
        """The auxiliary losses of the last step by name, and the entries of a loss that is a dict.

        Each is the mean over microbatches and data, summed over stages, without loss_scale. Equal on every
        process of the mesh, names sorted; {} if there are none. Collective over the mesh.
        """
        return summed(self.place.gather(self.step_losses.means()), self.place.num_pipelines)

    # ---- Timetables

    @property
    def can_leave_out(self) -> bool:
        """Whether a step may have empty microbatches, also where other replicas have none.

        False with an extra that excludes them, and where each F and B exchanges with the others:
        with reshard="microbatch", and where replicas share experts.
        """
        shards = self._reshard == "microbatch" and self.place.size(SHARD) > 1
        if shards or EXPERT in self.place.expert_groups:
            return False
        return not any(EMPTY_MICROBATCHES in each.excludes for each in self._rank.extras)

    def use_timetable(self, timetable: Timetable | str) -> None:
        """Follow another timetable, or its text, from the next call on; with any number of microbatches.

        All ranks must be given the same one, before the same call: else that call raises AgreementError. The
        programs of the last 64 timetables are kept. Extras that exclude empty microbatches are made for one
        timetable: they are attached again, so this is collective with them. Raises PlanError for a timetable
        that can't run, and ValueError if it places stages on other ranks.
        """
        self._rank.use_timetable(timetable)
        self.timetable = self._rank.timetable

    # ---- The end

    def close(self) -> None:
        """Give up the links and process groups that were made for this pipeline; no step follows.

        Modules, gradients and the group that the caller gave stay. Collective: a rank waits here until all
        ranks have come, since another may still read what this one has sent. After a failure, and the second
        time, it doesn't wait. Raises CommunicationError if another rank is gone, or does not come within the
        timeout: close several pipelines in the same order on all ranks.
        """
        try:
            if not self._rank.over:
                self.finish_update()
                self._wait_for_all()
        finally:
            self.end("the pipeline was closed")

    def _wait_for_all(self) -> None:
        try:
            synchronize(self.device)
            self._rank.tell_close()
            if self.timetable.num_ranks > 1:
                gather(None, self.group)
        except Exception as error:
            self._rank.extras.fail(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if not self._rank.over:  # other ranks may wait for a message of this one
                self._rank.extras.fail(error)
        finally:
            self.end(f"an error ended the pipeline ({error_text(error)})")

    @property
    def is_over(self) -> bool:
        """Whether no call can follow: the pipeline was closed, or has failed."""
        return bool(self._rank.over)

    def end(self, why: str) -> None:
        """Give up links and groups as `close` does, but at once: on gloo, ranks that wait for this one fail.

        why: for the error of later calls.
        """
        self._rank.end(why)
        if self._made_group is not None:
            close_groups([self._made_group])
            self._made_group = None
