"""Stages that FSDP2 shards, driven microbatch by microbatch. All private FSDP names are in this file.

FSDP2 gathers a block's weights by hooks of its forward and of its backward, and reduces the block's gradients
at the end of every backward. In a pipeline gradients are complete only after the stage's last W:

    begin             F  F  B  F  W  B  W ...      start                         finish
    don't reduce      weights are gathered and     reduce-scatter what the       wait; gradients
                      freed as `reshard` says      W's have summed, free         are on the shards

With reshard="step" the first F starts to gather all blocks' weights before it runs: a shard whose rows reach
no expert of a layer, say, would else not take part in gathering it, and the others would wait.

W adds to the `.grad` of the gathered weight. This `.grad` has memory of its own, which stays when FSDP2 frees
the weight. If the policy's reduce_dtype differs from the weight's dtype, this `.grad` has the reduce_dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.autograd import WeightGrads
from zbpp.features.reductions.reduce import Ended, Flags
from zbpp.job.errors import communicating
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.processes.dtensors import is_freed, is_spread, local_of
from zbpp.runtime.processes.mesh import EXPERT, MeshPosition, Reshard
from zbpp.runtime.processes.wrapped_stages import is_fully_sharded
from zbpp.runtime.stage import RunW


class FullyShardedStage:
    """The weights and gradients of one stage that is wrapped in fully_shard. A Reducer.

    reshard: when gathered weights are freed. "step": after the stage's last W. "microbatch": after each F
    and each B. place: this process in the mesh. what: for error messages. Collective over the shards: the
    constructor gathers each block's weights once.
    """

    def __init__(self, stage: nn.Module, reshard: Reshard, place: MeshPosition, what: str) -> None:
        self._stage: Any = cast(Any, stage)
        self._place, self._what = place, what
        self.frees_before_w = reshard == "microbatch"
        self._state: Any = self._stage._get_fsdp_state()
        self._state._lazy_init()
        self._modules: list[Any] = [*dict.fromkeys(_inside_out(stage))]
        self._groups = [group for state in self._state._state_ctx.all_states for group in _groups_of(state)]
        self._params = [each for group in self._groups for each in group.fsdp_params]
        self._flags = Flags()
        self._trained: list[Any] = []
        self._before: list[Tensor | None] = []  # per trained parameter, its `.grad` before the reduction
        self._is_missing: list[bool] = []  # per trained parameter, whether this step gave no gradient here
        if "loss" not in vars(stage) and callable(getattr(stage, "loss", None)):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(stage, "loss")  # it reads weights, as forward does
        self._stage.set_reshard_after_forward(self.frees_before_w)
        self._stage.set_requires_all_reduce(True)
        self._set_prefetch()
        self._allocate_gathered()

    # ---- A step, as a Reducer

    def begin(self) -> None:
        """Called before the first F of a step."""
        self._set_reductions(False)

    def start(self, ended: Ended | None = None) -> None:
        """Reduce what the W's have summed. On gloo FSDP2 waits here for the other shards."""
        self._trained = [each for each in self._params if each.sharded_param.requires_grad]
        self._before = [each.sharded_param.grad for each in self._trained]
        self._is_missing = [_add_zeros_if_missing(each) for each in self._trained]
        self._wait_for_gathered()
        for each in self._trained:
            # Experts have summed over the rows of all processes that share them.
            if is_spread(each.sharded_param):
                _divide_gradient(each, self._place.size(EXPERT))
        self._set_reductions(True)
        with communicating(self._what):
            for group in reversed(self._groups):
                group.post_backward()
        if ended is not None:
            self._call_after_reduction(ended)

    def finish(self) -> None:
        """Wait. A parameter without a gradient on any process gets back the `.grad` from before the step."""
        with communicating(self._what):
            self._state._root_post_backward_final_callback()
            counts = self._flags.on(self._state._device, [not each for each in self._is_missing])
            self._place.sum_over(self._place.divided_over("step"), counts)
        if any(self._is_missing):
            for param, before, count in zip(self._trained, self._before, counts.tolist(), strict=True):
                param.sharded_param.grad = param.sharded_param.grad if count else before
        self._trained, self._before, self._is_missing = [], [], []
        self.free()

    def abandon(self) -> None:
        """Drop what a failed step or evaluation has left, and put FSDP2 into the state that it had before."""
        if hasattr(self._stage, "reset_iter_state"):  # torch 2.11 has none: it can't go on after an error
            self._stage.reset_iter_state()
        for param in self._params:
            _drop_gradient(param)
        self._trained, self._before, self._is_missing = [], [], []
        self._set_reductions(True)

    # ---- Weights

    def run_f(self, run: Run, message: Message) -> Message:
        """F, with reshard="step". Blocks that are not gathered yet are, whether F calls them or not."""
        for group in self._groups:
            group.unshard(async_op=True)  # the block's own hook waits
        return run(message)

    def free(self) -> None:
        """Make the shards the stage's parameters again. Called after each step and each evaluation."""
        self._wait_for_gathered()
        for group in self._groups:
            group._post_forward_indices.clear()  # forward adds to these; an evaluation has no backward
        self._state._comm_ctx.post_forward_order.clear()
        for module in self._modules:
            module.reshard()

    def run_w(self, run_w: RunW, microbatch: int, weight_grads: WeightGrads) -> None:
        """W. Weights that W reads (the x of a product may be one) are gathered before it, and freed again."""
        is_needed = any(map(is_freed, weight_grads.tensors()))
        modules = self._modules if is_needed else []
        for module in modules:
            module.unshard()
        run_w(microbatch, weight_grads)
        for module in modules:
            module.reshard()

    def _wait_for_gathered(self) -> None:
        """Wait for the blocks that no F has called."""
        for group in self._groups:
            group.wait_for_unshard()

    def _allocate_gathered(self) -> None:
        """Gather each weight and free it again, so that the tensor exists whose `.grad` the W's sum in.

        Its grad_dtype is the dtype in which the policy reduces.
        """
        for group in self._groups:
            if all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                continue  # an earlier pipeline of the same stages has done this
            group.unshard()
            group.wait_for_unshard()
            for param in group.fsdp_params:
                if param.reduce_dtype is not None and param.sharded_param.requires_grad:
                    param._unsharded_param.grad_dtype = param.reduce_dtype
            group.reshard()

    # ---- Settings

    def _set_prefetch(self) -> None:
        """Let each module, in B, gather the one that B enters next; the last one gathers nothing.

        By default FSDP2 gathers the block that ran before in time, which may be another microbatch's.
        """
        befores = [self._modules[0], *self._modules]  # the first is given itself: nothing to do
        for module, before in zip(self._modules, befores, strict=False):
            module.set_modules_to_backward_prefetch([before])

    def _set_reductions(self, are_on: bool) -> None:
        """Let FSDP2's backward reduce gradients, or only sum them."""
        self._stage.set_is_last_backward(are_on)
        self._stage.set_requires_gradient_sync(are_on)
        self._stage.set_reshard_after_backward(self.frees_before_w or are_on)

    def _call_after_reduction(self, ended: Ended) -> None:
        """Call `ended` with the stream as the current one on which the last reduction runs."""
        if not self._groups:
            return ended()
        comm, group = self._state._comm_ctx, self._groups[0]  # reduced last, see start
        stream = comm.all_reduce_stream if group._is_hsdp else comm.reduce_scatter_stream
        with group.device_handle.stream(stream):
            return ended()


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """The wrapped modules, each behind those inside it: B enters them in the reverse order."""
    for child in module.children():
        yield from _inside_out(child)
    if is_fully_sharded(module):
        yield module


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of a wrapped module; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _add_zeros_if_missing(param: Any) -> bool:
    """If the gradient is missing, make it zeros: all shards must reduce the same. Returns whether it was."""
    weight = param._unsharded_param
    if weight.grad is not None or param.unsharded_accumulated_grad is not None:
        return False
    weight.grad = torch.zeros_like(weight, dtype=getattr(weight, "grad_dtype", None) or weight.dtype)
    return True


def _divide_gradient(param: Any, divisor: int) -> None:
    for total in (param._unsharded_param.grad, param.unsharded_accumulated_grad):
        if total is not None:
            local_of(total).div_(divisor)


def _drop_gradient(param: Any) -> None:
    """Drop what has been summed. Before torch 2.15 FSDP2 may hold a sum of its own beside `.grad`."""
    param._unsharded_param.grad = None
    if param.unsharded_accumulated_grad is not None:
        param.unsharded_accumulated_grad = None


def meshes_of(stage: nn.Module) -> list[tuple[DeviceMesh, DeviceMesh]]:
    """Return the pairs (mesh of a parameter, mesh over which its gradient is averaged), each pair once.

    Only parameters that fully_shard holds count. The two meshes differ where tensor parallelism splits the
    parameter, too: then the first mesh has the tensor dimensions behind the second mesh's.
    """
    states = [each._get_fsdp_state() for each in stage.modules() if is_fully_sharded(each)]  # type: ignore[operator]
    params = [each for state in states for group in _groups_of(state) for each in group.fsdp_params]
    pairs = [(each.sharded_param.device_mesh, each.mesh_info.mesh) for each in params]
    return list({id(mesh): (mesh, reduced) for mesh, reduced in pairs}.values())
