"""One stage that FSDP2 shards, driven microbatch by microbatch. All private FSDP names are in this file.

FSDP2 gathers a block's weights by hooks of its forward and of its backward, and reduces the block's gradients
at the end of every backward. In a pipeline gradients are complete only after the stage's last W:

    begin             F  F  B  F  W  B  W ...      start                         finish
    don't reduce      weights are gathered and     reduce-scatter what the       wait; gradients
                      freed as `reshard` says      W's have summed, free         are on the shards

W adds to the `.grad` of the gathered weight, a tensor of its own that the weight's freed memory leaves alone.
Where the policy's reduce_dtype differs from the weight's dtype, this `.grad` has the reduce_dtype.
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
from zbpp.runtime.reduce import Ended
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
    and each B. "never": they stay allocated, and are gathered anew where a shard differs from what was
    gathered. place: where the shards lie. what: for error messages.

    Raises ValueError for a stage whose reductions were turned off, and for a torch that FSDP's private names
    have changed in. Collective over the shards: each block's weights are gathered once.
    """

    def __init__(self, stage: nn.Module, reshard: Reshard, place: Place, what: str) -> None:
        self._stage, self._place, self._what = stage, place, what
        self._per_microbatch, self._stays = reshard == "microbatch", reshard == "never"
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
        self._trained: list[Any] = []
        self._before: list[Tensor | None] = []  # per trained parameter, its `.grad` before the reduction
        self._is_missing: list[bool] = []  # per trained parameter, whether this step gave no gradient here
        self._check_settings()
        self._set_prefetch()
        self._make_gathered_weights()

    @property
    def _states(self) -> list[Any]:
        states: list[Any] = self._state._state_ctx.all_states
        return states

    # ---- A step, as a Reducer

    def begin(self) -> None:
        """Called before the first F of a step. Raises ValueError if the user has turned reductions off."""
        self._check_settings()
        self._set_reductions(False)
        self._take_out()

    def start(self, ended: Ended | None = None) -> None:
        """Reduce what the W's have summed; on gloo this waits."""
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
        """Wait, and let a parameter that no process of the mesh has used keep the gradient it had."""
        with communicating(self._what):
            self._state._root_post_backward_final_callback()
            counts = torch.tensor([not each for each in self._is_missing], dtype=torch.int32)
            counts = counts.to(self._state._device)
            self._place.sum_over_data(counts)
        if any(self._is_missing):
            for param, before, count in zip(self._trained, self._before, counts.tolist(), strict=True):
                param.sharded_param.grad = param.sharded_param.grad if count else before
        self._trained, self._before, self._is_missing = [], [], []
        self._put_away()

    def abandon(self) -> None:
        """Drop all that a step or an evaluation has begun; FSDP's state is as before it."""
        if hasattr(self._stage, "reset_iter_state"):
            self._stage.reset_iter_state()  # type: ignore[operator]
        else:
            self._reset()
        for param in self._params:
            _drop_gradient(param)
        self._trained, self._before, self._is_missing = [], [], []
        self._set_reductions(True)

    # ---- Weights

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it forward runs without gradients; afterwards weights are freed as `reshard` says."""
        self._stage.set_reshard_after_forward(self._per_microbatch)  # type: ignore[operator]
        self._take_out()
        yield
        self._put_away()

    @contextmanager
    def gathered_for(self, weight_grads: WeightGrads) -> Iterator[None]:
        """Within it W may run: weights that it reads (x of a layer may be a weight) are gathered."""
        is_needed = any(map(_is_freed, weight_grads.tensors()))
        for module in self._modules if is_needed else ():
            module.unshard()
        yield
        for module in self._modules if is_needed else ():
            module.reshard()

    @property
    def frees_before_w(self) -> bool:
        """Whether a W may find the weights freed."""
        return self._per_microbatch

    def _take_out(self) -> None:
        """Where weights stay: use them as they are, if no shard has changed since they were gathered."""
        if self._stays and not self._has_changed():
            for group in self._groups:
                group._to_unsharded()

    def _put_away(self) -> None:
        """The stage's parameters are the shards again. Free the gathered weights, unless they stay."""
        for group in self._groups:
            if self._stays:
                _register_shards(group)
            group._post_forward_indices.clear()  # an evaluation adds to these, and no backward takes away
        self._state._comm_ctx.post_forward_order.clear()
        if not self._stays:
            for module in self._modules:
                module.reshard()

    def _has_changed(self) -> bool:
        """Whether a shard of any process differs from its part of the gathered weights. Collective."""
        size, rank = self._place.size(SHARD), self._place.coordinate(SHARD)
        changed = [_differs(each, size, rank) for each in self._params]
        flag = torch.stack(changed).any().int() if changed else torch.zeros((), dtype=torch.int32)
        flag = flag.to(self._state._device)
        with communicating(f"{self._what}, comparing shards with gathered weights"):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._place.groups[SHARD])
        return bool(flag)

    def _make_gathered_weights(self) -> None:
        """Let each gathered weight exist, freed, and sum its gradient in the dtype it is reduced in."""
        for group in self._groups:
            if all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                continue  # a pipeline before this one has done it
            group.unshard()
            group.wait_for_unshard()
            for param in group.fsdp_params:
                if param.reduce_dtype is not None and param.sharded_param.requires_grad:
                    param._unsharded_param.grad_dtype = param.reduce_dtype
            group.reshard()

    # ---- Settings

    def _set_prefetch(self) -> None:
        """In B each block gathers the block before it, and the first block none.

        By default FSDP2 gathers the block that ran before in time, which may be another microbatch's.
        """
        root, *blocks = self._modules
        in_order = [*blocks, root]
        for module, before in zip(in_order, [in_order[0], *in_order], strict=False):
            module.set_modules_to_backward_prefetch([before])

    def _set_reductions(self, are_on: bool) -> None:
        stage: Any = self._stage
        stage.set_is_last_backward(are_on)
        stage.set_requires_gradient_sync(are_on)
        stage.set_reshard_after_forward(self._per_microbatch)
        stage.set_reshard_after_backward(self._per_microbatch or (are_on and not self._stays))

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
        """Call `ended` on the stream that the last group's reduction ends on."""
        if not self._groups:
            return ended()
        comm, group = self._state._comm_ctx, self._groups[0]
        stream = comm.all_reduce_stream if group._is_hsdp else comm.reduce_scatter_stream
        with group.device_handle.stream(stream):
            return ended()

    def _reset(self) -> None:
        """What FSDPModule.reset_iter_state does; torch 2.11 has no such method."""
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
    """Give a parameter without a gradient zeros: all processes have to reduce the same. Returns whether."""
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
    """Whether the shard differs from its part of the gathered weight, as a scalar; also if that is freed."""
    weight, shard = local_of(param._unsharded_param.detach()), local_of(param.sharded_param.detach())
    if _is_freed(weight):
        return torch.ones((), dtype=torch.bool, device=weight.device)
    parts = weight.chunk(size, param.fsdp_placement.dim)
    if rank >= len(parts):
        return torch.zeros((), dtype=torch.bool, device=weight.device)
    return torch.ne(parts[rank], shard.to(weight.dtype)).any()


def _is_freed(tensor: Tensor) -> bool:
    local = local_of(tensor)
    return local.layout is torch.strided and local.numel() > 0 and local.untyped_storage().nbytes() == 0
