"""One stage that FSDP2 shards, driven microbatch by microbatch. All private FSDP names are in this file.

FSDP2 gathers a block's weights by hooks of its forward and of its backward, and reduces the block's gradients
at the end of every backward. In a pipeline gradients are complete only after the stage's last W:

    begin             F  F  B  F  W  B  W ...      start                         finish
    don't reduce      weights are gathered and     reduce-scatter what the       wait; gradients
                      freed as `reshard` says      W's have summed, free         are on the shards

W adds to the `.grad` of the gathered weight. This `.grad` has memory of its own, which stays when FSDP2 frees
the weight. If the policy's reduce_dtype differs from the weight's dtype, this `.grad` has the reduce_dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.autograd import WeightGrads
from zbpp.runtime.mesh import SHARD, Place, is_fully_sharded, local_of
from zbpp.runtime.reduce import Ended, Flags
from zbpp.runtime.world import communicating

Reshard = Literal["never", "step", "microbatch"]
RESHARD: tuple[str, ...] = get_args(Reshard)

_NAMES = {  # the private names that are used here
    "state": ("_lazy_init", "_device", "_state_ctx", "_comm_ctx", "_root_post_backward_final_callback"),
    "group": (
        *("fsdp_params", "post_backward", "unshard", "wait_for_unshard", "_to_unsharded", "reduce_grads"),
        *("all_reduce_grads", "_sharded_state", "_training_state", "_post_forward_indices"),
    ),
    "parameter": (
        *("sharded_param", "sharded_state", "unsharded_accumulated_grad", "fsdp_placement"),
        "_setattr_on_modules",
    ),
}


class FullyShardedStage:
    """The weights and gradients of one stage that is wrapped in fully_shard. A Reducer.

    reshard: when gathered weights are freed. "step": after the stage's last W. "microbatch": after each F
    and each B. "never": not at all; they are gathered anew if a shard has changed since. place: this process
    in the mesh. what: for error messages.

    Raises ValueError for a stage whose reductions were turned off, and for a torch in which FSDP2's private
    names are others. Collective over the shards: the constructor gathers each block's weights once.
    """

    def __init__(self, stage: nn.Module, reshard: Reshard, place: Place, what: str) -> None:
        self._stage, self._place, self._what = stage, place, what
        self._per_microbatch, self._keeps_gathered = reshard == "microbatch", reshard == "never"
        self._state: Any = stage._get_fsdp_state()  # type: ignore[operator]
        _check_names("state", self._state)
        self._state._lazy_init()
        self._modules: list[Any] = [each for each in stage.modules() if is_fully_sharded(each)]
        self._groups = [group for state in self._states for group in _groups_of(state)]
        for group in self._groups:
            _check_names("group", group)
        self._params = [each for group in self._groups for each in group.fsdp_params]
        for param in self._params:
            _check_names("parameter", param)
        self._flags = Flags()
        self._trained: list[Any] = []
        self._before: list[Tensor | None] = []  # per trained parameter, its `.grad` before the reduction
        self._is_missing: list[bool] = []  # per trained parameter, whether this step gave no gradient here
        self._check_settings()
        self._set_prefetch()
        self._allocate_gathered()

    @property
    def _states(self) -> list[Any]:
        states: list[Any] = self._state._state_ctx.all_states
        return states

    # ---- A step, as a Reducer

    def begin(self) -> None:
        """Called before the first F of a step. Raises ValueError if the user has turned reductions off."""
        self._check_settings()
        self._set_reductions(False)
        self._reuse_gathered()

    def start(self, ended: Ended | None = None) -> None:
        """Reduce what the W's have summed. On gloo FSDP2 waits here for the other shards."""
        self._trained = [each for each in self._params if each.sharded_param.requires_grad]
        self._before = [each.sharded_param.grad for each in self._trained]
        self._is_missing = [_add_zeros_if_missing(each) for each in self._trained]
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
            self._place.sum_over_data(counts)
        if any(self._is_missing):
            for param, before, count in zip(self._trained, self._before, counts.tolist(), strict=True):
                param.sharded_param.grad = param.sharded_param.grad if count else before
        self._trained, self._before, self._is_missing = [], [], []
        self._return_to_shards()

    def abandon(self) -> None:
        """Drop what a failed step or evaluation has left, and put FSDP2 into the state that it had before."""
        if hasattr(self._stage, "reset_iter_state"):
            self._stage.reset_iter_state()  # type: ignore[operator]
        else:
            self._reset()
        for param in self._params:
            _drop_gradient(param)
        self._trained, self._before, self._is_missing = [], [], []
        self._set_reductions(True)

    # ---- Weights

    def begin_evaluation(self) -> None:
        """From now on forward runs without gradients."""
        self._stage.set_reshard_after_forward(self._per_microbatch)  # type: ignore[operator]
        self._reuse_gathered()

    def end_evaluation(self) -> None:
        """Free the weights as `reshard` says."""
        self._return_to_shards()

    @contextmanager
    def gathered_for(self, weight_grads: WeightGrads) -> Iterator[None]:
        """Within it W may run: weights that W reads (the x of a product may be one) are gathered."""
        is_needed = any(map(_is_freed, weight_grads.tensors()))
        modules = self._modules if is_needed else []
        for module in modules:
            module.unshard()
        yield
        for module in modules:
            module.reshard()

    @property
    def frees_before_w(self) -> bool:
        """Whether a W may find the weights freed."""
        return self._per_microbatch

    def _reuse_gathered(self) -> None:
        """With reshard="never": compute with the gathered weights, unless a shard has changed since."""
        if self._keeps_gathered and not self._has_changed():
            for group in self._groups:
                group._to_unsharded()

    def _return_to_shards(self) -> None:
        """Make the shards the stage's parameters again; free the gathered weights as `reshard` says."""
        for group in self._groups:
            if self._keeps_gathered:
                _register_shards(group)
            group._post_forward_indices.clear()  # forward adds to these; an evaluation has no backward
        self._state._comm_ctx.post_forward_order.clear()
        if not self._keeps_gathered:
            for module in self._modules:
                module.reshard()

    def _has_changed(self) -> bool:
        """Whether, on any process, a shard differs from the part of the gathered weights that it gave."""
        size, rank = self._place.size(SHARD), self._place.coordinate(SHARD)
        changed = [_differs(each, size, rank) for each in self._params]
        flag = torch.stack(changed).any().int() if changed else torch.zeros((), dtype=torch.int32)
        flag = flag.to(self._state._device)
        with communicating(f"{self._what}, comparing shards with gathered weights"):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._place.groups[SHARD])
        return bool(flag)

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
        """Let each block, in B, gather the block before it in the stage; the first block gathers nothing.

        By default FSDP2 gathers the block that ran before in time, which may be another microbatch's.
        """
        root, *blocks = self._modules
        in_order = [*blocks, root]  # B enters the root first; the first block is given itself: nothing to do
        for module, before in zip(in_order, [in_order[0], *in_order], strict=False):
            module.set_modules_to_backward_prefetch([before])

    def _set_reductions(self, are_on: bool) -> None:
        """Let FSDP2's backward reduce gradients, or only sum them."""
        stage: Any = self._stage
        stage.set_is_last_backward(are_on)
        stage.set_requires_gradient_sync(are_on)
        stage.set_reshard_after_forward(self._per_microbatch)
        stage.set_reshard_after_backward(self._per_microbatch or (are_on and not self._keeps_gathered))

    def _check_settings(self) -> None:
        is_on = self._state._state_ctx.is_last_backward
        if not is_on or not all(group.reduce_grads and group.all_reduce_grads for group in self._groups):
            raise ValueError(
                "set_requires_gradient_sync(False), set_requires_all_reduce(False) or "
                "set_is_last_backward(False) was called on a stage, but the Pipeline says when gradients are "
                "reduced: leave these calls out. Steps without zero_grad in between add up"
            )
        if any(each.sharded_param._backward_hooks for each in self._params):
            raise ValueError(
                "a sharded parameter has a hook by Tensor.register_hook, which FSDP2 never calls: use "
                "register_post_accumulate_grad_hook, which gets the reduced gradient, once per step"
            )

    def _call_after_reduction(self, ended: Ended) -> None:
        """Call `ended` with the stream as the current one on which the last reduction runs."""
        if not self._groups:
            return ended()
        comm, group = self._state._comm_ctx, self._groups[0]  # reduced last, see start
        stream = comm.all_reduce_stream if group._is_hsdp else comm.reduce_scatter_stream
        with group.device_handle.stream(stream):
            return ended()

    def _reset(self) -> None:
        """Do what FSDPModule.reset_iter_state does; torch 2.11 has no such method."""
        context, comm = self._state._state_ctx, self._state._comm_ctx
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        comm.all_gather_state = comm.reduce_scatter_state = None
        comm.post_forward_order.clear()
        for state in self._states:
            state._training_state = type(state._training_state).IDLE
        for group in self._groups:
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = group._post_reduce_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group.reshard()


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of a wrapped module; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _check_names(kind: str, thing: Any) -> None:
    missing = [name for name in _NAMES[kind] if not hasattr(thing, name)]
    if missing:
        raise ValueError(
            f"torch {torch.__version__} has another FSDP2: {type(thing).__name__} has no "
            f"{', '.join(missing)}. shard= works with torch 2.11 to 2.15: install one of these, "
            "or use replicate="
        )


def _add_zeros_if_missing(param: Any) -> bool:
    """If the gradient is missing, make it zeros: all shards must reduce the same. Returns whether it was."""
    weight = param._unsharded_param
    if weight.grad is not None or param.unsharded_accumulated_grad is not None:
        return False
    weight.grad = torch.zeros_like(weight, dtype=getattr(weight, "grad_dtype", None) or weight.dtype)
    return True


def _drop_gradient(param: Any) -> None:
    """Drop what has been summed. Before torch 2.15 FSDP2 may hold a sum of its own beside `.grad`."""
    param._unsharded_param.grad = None
    if param.unsharded_accumulated_grad is not None:
        param.unsharded_accumulated_grad = None


def _register_shards(group: Any) -> None:
    """Make the shards the stage's parameters, as resharding does, without freeing the gathered weights."""
    for param in group.fsdp_params:
        param._setattr_on_modules(param.sharded_param)
        param.sharded_state = type(param.sharded_state).SHARDED
    group._sharded_state = type(group._sharded_state).SHARDED


def _differs(param: Any, size: int, rank: int) -> Tensor:
    """A boolean scalar: whether the gathered weight is freed, or the shard differs from its part of it."""
    weight, shard = local_of(param._unsharded_param.detach()), local_of(param.sharded_param.detach())
    if _is_freed(weight):
        return torch.ones((), dtype=torch.bool, device=weight.device)
    parts = weight.chunk(size, param.fsdp_placement.dim)
    if rank >= len(parts):
        return torch.zeros((), dtype=torch.bool, device=weight.device)
    return torch.ne(parts[rank], shard.to(weight.dtype)).any()


def _is_freed(tensor: Tensor) -> bool:
    """Whether FSDP2 has freed the tensor's memory: it does so by giving the storage no bytes."""
    local = local_of(tensor)
    return local.layout is torch.strided and local.numel() > 0 and local.untyped_storage().nbytes() == 0
