"""Pipeline: what a user calls. It executes a plan and never chooses.

    timetable --lower--> program --resolve--> [(what to call, with which messages)] --run--> .grad

Everything that can be known before the first step is done in the constructor. `step` and `evaluate` are run
by the Engine, which also says what happens when a rank fails. This file has construction and `step`; the
other methods are in

    pipeline_evaluation        evaluate and predict: forward alone
    pipeline_state             parameters, their names, state_dict
    pipeline_gradient_release  weights that are updated inside the step
    pipeline_validation        an update that the next step waits for
    pipeline_timeline          what is measured
    pipeline_end               close, and the end after an error
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.error_text import error_text
from zbpp.runtime.arguments import device_of, model_of, rank_in, timetable_of
from zbpp.runtime.call import Call
from zbpp.runtime.call_order import order_of_copies
from zbpp.runtime.checks import Agreed, agree_on_stages, check_ranks_agree
from zbpp.runtime.engine import Engine
from zbpp.runtime.extra import Extra
from zbpp.runtime.fully_shard import Reshard
from zbpp.runtime.groups import group_of_this_process, set_timeout
from zbpp.runtime.mesh import TENSOR, Place
from zbpp.runtime.named_losses import NamedLosses, summed
from zbpp.runtime.one_call import OneCall
from zbpp.runtime.parameters import StageParameters
from zbpp.runtime.pipeline_evaluation import PipelineEvaluation
from zbpp.runtime.pipeline_gradient_release import PipelineGradientRelease
from zbpp.runtime.pipeline_timeline import PipelineTimeline
from zbpp.runtime.rank_parts import RankParts
from zbpp.runtime.reductions import Reductions
from zbpp.runtime.restored import restored_generators
from zbpp.runtime.stage import Loss
from zbpp.runtime.tensor_parallel import LossesAlike
from zbpp.runtime.ties import Tie
from zbpp.runtime.weight_offload import check_offloaded
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel

AnExtra = TypeVar("AnExtra", bound=Extra)


class Pipeline(PipelineEvaluation, PipelineGradientRelease, PipelineTimeline):
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
    after each F and each B, and then they are gathered twice per microbatch.
    mp_policy: the torch.distributed.fsdp.MixedPrecisionPolicy of the stages that the Pipeline shards.
    extras: what the pipeline does beside running its program, see extra.py; the same on all ranks.
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
    pending_update: an update that the next call has to wait for: `step` before its first B, other methods at
    once; see zbpp.PostValidation, which sets it.

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
        extras: Iterable[Extra] = (),
    ) -> None:
        given = Place(mesh, group)
        for each in given.mesh_groups():
            set_timeout(each, timeout)
        self._given_group = group
        self.timetable = timetable = timetable_of(timetable, num_microbatches, given)
        self.rank = rank_in(given.pipeline, timetable)
        self.seed, self.loss_scale, self._extras = seed, 1.0, tuple(extras)
        self._timeout, self._dynamic_shapes, self._reshard = timeout, dynamic_shapes, reshard
        self.step_losses, self.evaluation_losses = NamedLosses(), NamedLosses()
        self._take_place(given)
        check_ranks_agree(timetable, self.place, dynamic_shapes=dynamic_shapes)
        agreed = agree_on_stages(stages, timetable, self.rank, device, self.place)
        self._take_stages(agreed, model_of(stages), loss_fn)
        self._engine = self._make_engine(agreed)
        try:
            self._use_extras(agreed.ties, mp_policy)
        except BaseException as error:
            self._end(f"it could not be made ({error_text(error)})")
            raise
        self._one_call = OneCall()

    def _take_place(self, given: Place) -> None:
        """One rank of a larger job needs a group, too, for what is collective; this pipeline closes it."""
        is_alone = self.timetable.num_ranks == 1 and given.pipeline is None
        self._made_group = group_of_this_process() if is_alone else None
        self.place = given if self._made_group is None else Place(None, self._made_group)
        self.group = self.place.pipeline

    def _take_stages(self, agreed: Agreed, model: PipelineModel | None, loss_fn: Loss | None) -> None:
        """The stages of this rank, their parameters and their device."""
        self._loss_fn = model.loss if loss_fn is None and model is not None else loss_fn
        # Read-only: a module put there later would not be run.
        self.stages = MappingProxyType(dict(sorted(agreed.stages.items())))
        computes_loss = self.timetable.rank_of[-1] == self.rank
        self._parameters = StageParameters(
            self.stages, agreed.names, agreed.ties, self.group, self._loss_fn if computes_loss else None
        )
        check_offloaded(self.stages.values(), agreed.ties, self.place, self._extras)
        self.device = device_of(self.stages.values(), self.group)

    def _make_engine(self, agreed: Agreed) -> Engine:
        """What runs this pipeline's calls. Collective."""
        place = self.place
        self._release_arguments = dict[str, Any]()
        key_of_all = place.broadcast(agreed.key)
        parts = RankParts(
            self.timetable,
            self.rank,
            self.stages,
            self._loss_fn,
            self.device,
            place,
            group=None if self._made_group is not None else self.group,
            key=agreed.key,
            timeout=self._timeout,
            dynamic_shapes=self._dynamic_shapes,
        )
        engine = Engine(parts, order_of_copies(place, key_of_all, self.rank, self.device))
        return engine

    def _use_extras(self, ties: Sequence[Tie], mp_policy: Any) -> None:
        """Take what sums this rank's gradients, then the extras that were given. Collective.

        Raises ValueError if sharding replaces a parameter that the loss shares with a stage.
        """
        of_loss = self._parameters.of_loss()
        reductions = Reductions(ties, reshard=self._reshard, mp_policy=mp_policy, loss=of_loss)
        self._engine.use(reductions)
        if any(self.place.gather(len(self._parameters.of_loss()) > len(of_loss))):
            raise ValueError(
                "the loss is a module that shares a parameter with a stage, and shards put another one in "
                "its place in the stage: let the loss hold the stage's module instead of its parameter"
            )
        self._copies, self._late = set(map(id, reductions.copies)), reductions.late
        self._engine.reductions = reductions
        for extra in ([LossesAlike()] if TENSOR in self.place.groups else []) + [*self._extras]:
            self._engine.use(extra)

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
        with self._one_call, restored_generators(self.device):
            call = Call(args, target, kwargs, loss_scale=self.loss_scale)
            settle = self._settle_in_step(call)
            losses, self.step_losses = self._engine.step(call, self._seeds(), settle, kind=self.step_kind)
        self.num_steps += 1
        return losses

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The extras that the pipeline was given."""
        return self._extras

    @contextmanager
    def using(self, extra: AnExtra) -> Iterator[AnExtra]:
        """Use an extra in the calls inside the block. Collective, if the extra is used on all ranks."""
        self._engine.use(extra)
        try:
            yield extra
        finally:
            self._engine.leave(extra)

    def auxiliary_losses(self) -> dict[str, float]:
        """The auxiliary losses of the last step by name, and the entries of a loss that is a dict.

        Each is the mean over microbatches and data, summed over stages, without loss_scale. Equal on every
        process of the mesh, names sorted; {} if there are none. Collective over the mesh.
        """
        return summed(self.place.gather(self.step_losses.means()), self.place.num_pipelines)

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
            extras=self._extras,
        )
        following.num_steps, following.loss_scale = self.num_steps, self.loss_scale
        if self._release_arguments:
            following.release_gradients(**self._release_arguments)
        return following
