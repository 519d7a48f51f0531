"""Pipeline: what a user calls. It executes a plan and never chooses.

    timetable --lower--> program --resolve--> [(what to call, with which messages)] --run--> .grad

Everything that can be known before the first step is done in the constructor. `step` and `evaluate` are run
by the Engine, which also says what happens when a rank fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.arguments import device_of, model_of, rank_in, timetable_of
from zbpp.runtime.call_order import order_of_copies
from zbpp.runtime.checks import agree_on_stages, check_ranks_agree
from zbpp.runtime.engine import Engine, error_text
from zbpp.runtime.feed import Call
from zbpp.runtime.fully_shard import Reshard
from zbpp.runtime.groups import close_groups, group_of_this_process, set_timeout
from zbpp.runtime.measure import Recorder, measured_timeline
from zbpp.runtime.mesh import TENSOR, Place
from zbpp.runtime.named_losses import NamedLosses, summed
from zbpp.runtime.offload_plan import ActivationOffload, check_one_offload, offload_maker
from zbpp.runtime.outputs import Metrics, Outputs
from zbpp.runtime.parameters import StageParameters
from zbpp.runtime.posts import Posts
from zbpp.runtime.reductions import Reductions
from zbpp.runtime.released import make_release
from zbpp.runtime.restored import eval_mode, restored_generators
from zbpp.runtime.stage import Loss
from zbpp.runtime.tensor_parallel import check_losses_alike
from zbpp.runtime.weight_offload import check_offloaded
from zbpp.runtime.world import gather
from zbpp.schedule import Timeline, Timetable
from zbpp.seeding import seed_of
from zbpp.stage_api import PipelineModel


class Gate(Protocol):
    """An update of the weights that is not known to be right yet: see Pipeline.gate."""

    def validate(self) -> bool:
        """Wait until it is known, and make the weights right. Returns whether they were right."""

    def open(self) -> None:
        """Drop the gradients of the update: the next step adds its own from now on."""


class Pipeline:
    """One rank of a pipeline.

    stages: {stage index: module}, exactly those that `timetable` gives to this rank; or a model (see
    zbpp/stage_api.py), which then builds them. Stages of one rank may share parameters. A stage whose
    parameter is tied to another rank's declares it: `tied_parameters = {"head.weight": "embedding.weight"}`
    (see there). Each rank has a copy: all begin with the values of the first stage's, and get the sum of all
    gradients.
    timetable: a Timetable; or the name of a schedule, which is then planned for the ranks of the group and
    num_microbatches.
    loss_fn(output, target) -> scalar. None: the model's loss; without a model, the last stage's module
    returns the loss.
    group: the pipeline's process group (None: the default one); a pipeline of one rank needs none.
    mesh: a DeviceMesh with a dimension "pipeline", and "replicate", "shard", "tensor" as wanted, instead of
    group; see zbpp.make_mesh. The processes of one pipeline differ in the first dimension alone. Replicas and
    shards are given different rows; all that hold a copy of a parameter get the mean of its gradients. With
    shards, plain stages are wrapped in fully_shard here: make the optimizer afterwards, of `parameters()`.
    reshard: when gathered weights of sharded stages are freed: "step", after a stage's last W; "microbatch",
    after each F and each B, and then they are gathered twice per microbatch; "never".
    mp_policy: the torch.distributed.fsdp.MixedPrecisionPolicy of the stages that the Pipeline shards.
    offload: which activations leave device memory between F and B, see ActivationOffload; None: none. Results
    are the same to the last bit. Without costs of its own it decides after the second step.
    seed: of the random numbers drawn in forward. timeout: seconds that a wait for another rank may last.
    dynamic_shapes: whether messages between stages may differ from microbatch to microbatch (shapes, dtypes,
    which tensors there are); each message then says its layout, and takes one more latency.
    device: where a model's stages go (None: this process's CUDA device if the group is NCCL's, else the CPU);
    given stages stay where they are.

    num_steps: how many steps are done. The random numbers of the next step depend on it: set it to go on with
    a run that was saved.
    step_losses, evaluation_losses: this rank's part of the named losses of the last step and evaluation.
    loss_scale: a factor on all gradients that `step` computes, 1.0 until it is set; the losses that `step`
    returns don't have it. With float16 it keeps small gradients above zero; whoever sets it divides it out.
    gate: an update that the next call has to wait for: `step` before its first B, other methods at once; see
    zbpp.PostValidation, which sets it.

    Raises TypeError or ValueError for stages, a group or a mesh that don't fit the timetable, for stages in
    DistributedDataParallel, and for stages in FSDP that aren't sharded over this mesh; AgreementError if
    ranks were given different timetables. Collective over the group or the mesh. As a context manager it
    closes at the end.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module] | PipelineModel,
        timetable: Timetable | str | None = None,
        loss_fn: Loss | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: DeviceMesh | None = None,
        num_microbatches: int | None = None,
        seed: int = 0,
        timeout: float = 600.0,
        dynamic_shapes: bool = False,
        device: torch.device | str | None = None,
        reshard: Reshard = "step",
        mp_policy: Any = None,
        offload: ActivationOffload | None = None,
    ) -> None:
        given = Place(mesh, group)
        for each in given.mesh_groups():
            set_timeout(each, timeout)
        self._given_group = group
        self.timetable = timetable = timetable_of(timetable, num_microbatches, given)
        self.rank = rank_in(given.pipeline, timetable)
        self.seed, self.num_steps, self.loss_scale = seed, 0, 1.0
        self._timeout, self._dynamic_shapes, self._reshard = timeout, dynamic_shapes, reshard
        self._offload = offload
        # One rank of a larger job needs a group, too, for what is collective; this pipeline closes it.
        is_alone = timetable.num_ranks == 1 and given.pipeline is None
        self._made_group = group_of_this_process() if is_alone else None
        self.place = place = given if self._made_group is None else Place(None, self._made_group)
        self.group = place.pipeline
        check_ranks_agree(timetable, dynamic_shapes, place)
        agreed = agree_on_stages(stages, timetable, self.rank, device, place)
        model = model_of(stages)
        self._loss_fn = model.loss if loss_fn is None and model is not None else loss_fn
        self.stages = dict(sorted(agreed.stages.items()))
        computes_loss = timetable.rank_of[-1] == self.rank
        self._parameters = StageParameters(
            self.stages, agreed.names, agreed.ties, self.group, self._loss_fn if computes_loss else None
        )
        check_offloaded(self.stages.values(), agreed.ties, place)
        check_one_offload(offload, self.stages.values(), place)
        self.device = device_of(self.stages.values(), self.group)
        of_loss = self._parameters.of_loss()
        reductions = Reductions(
            self.stages,
            agreed.ties,
            timetable.rank_of,
            place,
            rank=self.rank,
            group=self.group,
            timeout=timeout,
            reshard=reshard,
            mp_policy=mp_policy,
            loss=of_loss,
        )
        if any(place.gather(len(self._parameters.of_loss()) > len(of_loss))):
            raise ValueError(
                "the loss is a module that shares a parameter with a stage, and shards put another one in "
                "its place in the stage: let the loss hold the stage's module instead of its parameter"
            )
        self._copies = set(map(id, reductions.copies))
        self._late, self._release_arguments = reductions.late, dict[str, Any]()
        make_offload = offload_maker(offload, timetable, self.device, place)
        self._engine = Engine(
            timetable,
            self.rank,
            self.stages,
            self._loss_fn,
            self.device,
            reductions,
            order_of_copies=order_of_copies(place, place.broadcast(agreed.key), self.rank, self.device),
            group=given.pipeline,
            key=agreed.key,
            timeout=timeout,
            dynamic_shapes=dynamic_shapes,
            make_offload=make_offload,
        )
        self.step_losses, self.evaluation_losses = NamedLosses(), NamedLosses()
        self._compares_losses = TENSOR in place.groups  # in the first step
        self._recorder = Recorder(self.device)
        self._recording: Recorder | None = None
        self.gate: Gate | None = None
        self._lost_update = ""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages and of a loss that is a module, each once: for optimizers."""
        return (parameter for _, parameter in self._parameters.named())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """Those of `parameters` that this process counts: over the mesh, each part of each comes once.

        Replicas count each for itself.
        """
        mine = (each for each in self.parameters() if id(each) not in self._copies)
        return filter(self.place.counts, mine)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with the names that they have in the whole model: the stage modules' own.

        Where two stages of the pipeline use one name for different tensors, every name on every rank begins
        with `stages.{index}.`.
        """
        return self._parameters.named()

    def state_dict(self, stage: int | None = None, *, keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and persistent buffers under those names: of one stage, or of all this rank's."""
        self.settle()
        return self._parameters.state_dict(stage, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dict, which may be the whole model's.

        Raises RuntimeError, before anything is loaded, if a name of this rank is missing or one belongs to no
        stage of the pipeline; not if strict=False. Raises it, too, if tied parameters would get different
        values. Collective if ranks have copies of a tied parameter. The next step raises AgreementError if
        copies of a stage in a mesh were given different values.
        """
        self.settle()
        self._parameters.load_state_dict(state_dict, strict=strict)
        self._engine.loaded = self._parameters.fingerprint()

    def release_gradients(
        self, optimizer: torch.optim.Optimizer, *, accumulate: bool = False, keep_squares: bool = False
    ) -> None:
        """From the next step on, `step` updates this rank's weights itself and drops their gradients.

        A stage is updated behind its last W, or when its gradients have been reduced over replicas and
        shards; shared and tied parameters at the end. Losses are those of a loop with `optimizer.step()`
        after each step, to the last bit. Such a loop goes on without it, and without zero_grad; the
        learning rate may be changed between steps, also by torch's schedulers.

        optimizer: of all or some of `parameters()`; gradients of others stay, as without release.
        accumulate: each microbatch's gradients go into the states of an optimizer of torch-optimi, and are
        dropped one by one; see zbpp/runtime/optimizer_accumulation.py. keep_squares: `released_squares` then
        has what the norm is made of; not with accumulate.

        Gradients are gone when `step` returns: nothing can clip them by their norm, scale them, or skip an
        update because one is infinite or NaN. A step that fails may have updated some weights, and no
        step may follow it. Raises ValueError, on every rank, for what can't work. Collective over the mesh.
        """
        release, refusal = None, ""
        if self._release_arguments.get("optimizer", optimizer) is not optimizer:
            refusal = (
                "gradients are released to another optimizer already, and one call replaces the other: make "
                "one optimizer with a group for each kind of parameters"
            )
        loss = self._loss_fn if isinstance(self._loss_fn, nn.Module) else nn.Module()
        last = self.timetable.num_stages - 1
        try:
            release = make_release(
                optimizer,
                self.stages,
                self._late,
                loss.parameters() if last in self.stages else (),
                self.place,
                last,
                self.timetable.num_microbatches,
                accumulate=accumulate,
                keep_squares=keep_squares,
            )
        except ValueError as error:
            refusal = str(error)
        for each in self.place.gather(refusal):
            if each:
                raise ValueError(each)
        self._engine.release_gradients(release)
        self._release_arguments = {
            "optimizer": optimizer,
            "accumulate": accumulate,
            "keep_squares": keep_squares,
        }

    @property
    def releases_gradients(self) -> bool:
        """Whether steps update the weights themselves, and leave no gradients."""
        return bool(self._release_arguments)

    @property
    def released_squares(self) -> Mapping[int, Tensor]:
        """By id of each parameter that the last step updated, its gradient's sum of squares; see above."""
        return self._engine.released_squares

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """Forward and backward of one whole batch. Adds to each `.grad` the mean over microbatches.

        args: the batch's inputs, on the owner of stage 0. target: on the owner of the last stage. kwargs: for
        every stage owned here. Tensors in them, also inside tuples, lists and dicts, are split along dim 0
        into microbatches, except `zbpp.replicate(tensor)`. Returns the microbatches' losses on the last
        stage's owner, [] elsewhere.

        A tensor that requires grad gets its gradient after the last W: in its `.grad`, or by the backward of
        what it was computed from, which frees that graph. It is the gradient through this rank's stages; a
        tensor that several ranks pass as a keyword has its gradient in parts, one on each.

        An error on one of several ranks ends the pipeline on all of them. Where another rank waits for a
        message that can't come any more, it stops: on gloo with a CommunicationError at once; on NCCL torch's
        watchdog ends its process at the timeout. Every later call raises RuntimeError, as it does after
        `close`. The first step raises ValueError if tensor-parallel processes computed different losses.
        Raises AgreementError if another rank is in `evaluate`, or was given another number of rows.

        A rank that had finished the step keeps its gradients. On each other rank, after an error, num_steps
        is what it was, and a `.grad` that was None is None again. A `.grad` that existed may hold a part of
        the failed step: the error says so, and step refuses until that gradient is zeroed or dropped. Changes
        that forward made to buffers (BatchNorm's statistics), and all changes by hooks, are not undone.
        """
        with restored_generators(self.device):
            recorder = self._recording
            call = Call(args, target, kwargs, loss_scale=self.loss_scale)
            settle = None if self.gate is None else partial(self._pass_gate, self.gate, call)
            losses, self.step_losses = self._engine.step(call, self._seeds(), recorder, settle)
        if self._compares_losses:
            check_losses_alike(self.place, losses, self.step_losses.means())
            self._compares_losses = False
        self.num_steps += 1
        return losses

    def _pass_gate(self, gate: Gate, call: Call) -> Call | None:
        """Settle an update at the gate of a step. Returns the step's new call, if it has to begin again."""
        was_right = self._validated(gate)
        gate.open()
        return None if was_right else call._replace(loss_scale=self.loss_scale)

    def settle(self) -> None:
        """Wait for an update that is not known to be right yet; afterwards the weights are.

        Raises RuntimeError if that failed before: the weights may be wrong for good.
        """
        if self._lost_update:
            raise RuntimeError(self._lost_update)
        if self.gate is not None:
            self._validated(self.gate)

    def _validated(self, gate: Gate) -> bool:
        self.gate = None
        try:
            return gate.validate()
        except BaseException as error:
            self.give_up(f"an update could not be validated ({error_text(error)}), and may be wrong")
            raise

    def give_up(self, why: str) -> None:
        """End this pipeline, whose weights are not those of any step."""
        self._lost_update = (
            f"{why}: load weights and optimizer states of an earlier step, and make a new Pipeline"
        )
        self.gate = None
        self._end(why)

    def posts(self) -> Posts:
        """What the ranks post about updates that later steps have a gate for. The first call is collective.

        From then on each step notes whether a stage changes its inputs in place (`has_changed_inputs`).
        """
        if self._engine.posts is None:
            self._engine.posts = Posts(self.place, self._timeout)
        return self._engine.posts

    @property
    def gate_refusal(self) -> str:
        """Why no step of this rank can have a gate, or nothing."""
        return self._engine.gate_refusal

    @property
    def has_changed_inputs(self) -> bool:
        """Whether a stage of this rank has changed what a step was given; False until `posts` is called."""
        return self._engine.has_changed_inputs

    def auxiliary_losses(self) -> dict[str, float]:
        """The auxiliary losses of the last step by name, and the entries of a loss that is a dict.

        Each is the mean over microbatches and data, summed over stages, without loss_scale. Equal on every
        process of the mesh, names sorted; {} if there are none. Collective over the mesh.
        """
        return summed(self.place.gather(self.step_losses.means()), self.place.num_pipelines)

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
        gives no losses, and metrics gets None as the target.
        outputs: what the last stage returned, microbatches concatenated along dim 0; None on other ranks.
        metrics(output, target) -> {name: number}, called per microbatch; the means over all rows, {} on other
        ranks.
        """
        self.settle()
        seen = Outputs(is_kept=return_outputs, metrics=metrics) if return_outputs or metrics else None
        with (
            restored_generators(self.device),
            eval_mode([*self.stages.values(), self._loss_fn]),
            torch.no_grad(),
        ):
            call = Call(args, target, kwargs, seen.take if seen else None)
            losses, self.evaluation_losses = self._engine.evaluate(call, self._seeds())
        if seen is None:
            return losses
        found: list[Any] = [losses]
        if return_outputs:
            found.append(seen.concatenated())
        if metrics:
            found.append(seen.metrics())
        return tuple(found)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The last stage's output for a batch of any size, which is one microbatch; None on other ranks.

        As in `evaluate`: in eval mode, without gradients, at any time between steps. No loss is computed.
        """
        self.settle()
        seen = Outputs(is_kept=True, metrics=None)
        with (
            restored_generators(self.device),
            eval_mode([*self.stages.values(), self._loss_fn]),
            torch.no_grad(),
        ):
            self._engine.predict(Call(args, None, kwargs, seen.take), self._seeds())
        return seen.concatenated()

    @contextmanager
    def recording(self, recorder: Recorder | None = None) -> Iterator[None]:
        """Measure each action and message of the steps inside the block; `timeline` gives the last step.

        recorder: what notes them instead, and `timeline` does not.
        """
        self._recording = self._recorder if recorder is None else recorder
        try:
            yield
        finally:
            self._recording = None

    def name_actions(self, is_named: bool) -> None:
        """Show torch's profiler the instructions of the steps that follow by their text, `2F5`; or no longer.

        While they have no names, steps take no time for this.
        """
        self._engine.name_actions(is_named)

    def receive_buffers(self) -> list[Tensor]:
        """The buffers that messages of `step` are received into: as many as are in use at once."""
        return self._engine.receive_buffers()

    def timeline(self) -> Timeline:
        """The last step inside `recording`, as it ran on all ranks; it starts at 0 ms. Collective.

        peak_memory as `measured_timeline` has it. Raises RuntimeError if no step was recorded.
        """
        if self._recorder.is_empty:
            raise RuntimeError("no step was recorded: run one inside `with pipeline.recording():`")
        return measured_timeline(self._recorder, self.timetable, self.group)

    def offloaded_bytes(self) -> dict[int, int]:
        """Per stage of this rank, the most bytes of a microbatch that have left; {} without offload."""
        return self._engine.offloaded_bytes()

    def with_timetable(self, timetable: Timetable) -> Pipeline:
        """Close this pipeline; return one that goes on with the same stages under another timetable.

        num_steps goes on, too: losses and gradients are those that this pipeline would have had. Collective.
        Raises ValueError, and closes nothing, if the timetable places the stages on other ranks.
        """
        if not isinstance(timetable, Timetable):
            raise TypeError(f"with_timetable takes a Timetable, not {timetable!r}: write zbpp.plan(...)")
        if timetable.rank_of != self.timetable.rank_of:
            raise ValueError(
                "the timetable places the stages on other ranks than this pipeline's: rank_of "
                f"{list(timetable.rank_of)} instead of {list(self.timetable.rank_of)}"
            )
        self.settle()
        self.close()
        following = Pipeline(
            self.stages,
            timetable,
            self._loss_fn,
            self._given_group,
            mesh=self.place.mesh,
            seed=self.seed,
            timeout=self._timeout,
            dynamic_shapes=self._dynamic_shapes,
            reshard=self._reshard,
            offload=self._offload,
        )
        following.num_steps, following.loss_scale = self.num_steps, self.loss_scale
        if self._release_arguments:
            following.release_gradients(**self._release_arguments)
        return following

    def close(self) -> None:
        """Give up the links and process groups that were made for this pipeline; no step follows.

        Modules, gradients and the group that the caller gave stay. Collective: a rank waits here until all
        ranks have come, since another may still read what this one has sent. After a failure, and the second
        time, it doesn't wait. Raises CommunicationError if another rank is gone.
        """
        if self._engine.over:
            self._close_made_group()
            return
        self.settle()
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
        elif not self._engine.over:  # other ranks may wait for a message of this one
            self._end(f"an error ended the pipeline ({error_text(error)})")
        else:
            self._close_made_group()

    def _end(self, why: str) -> None:
        self._engine.end(why)
        self._close_made_group()

    def _close_made_group(self) -> None:
        if self._made_group is not None:
            close_groups([self._made_group])
            self._made_group = None

    def _seeds(self) -> dict[int, int]:
        """Per stage, the seed of its microbatch 0 in the next step."""
        # Processes that see different data draw different numbers.
        part = [self.place.data_part] if self.place.data_part else []
        return {stage: seed_of(self.seed, self.num_steps, stage, *part) for stage in self.stages}
