"""The dtypes of a run, for each value of `precision=`.

                   weights, F, B   gradients   optimizer's weights, states   loss scale
    float32        float32         float32     float32
    mixed_bfloat16 bfloat16        float32     float32
    mixed_float16  float16         float32     float32                       dynamic
    bfloat16       bfloat16        bfloat16    bfloat16
    float64        float64         float64     float64

In 16 bits only weights are cast. Tensors that a model keeps in another dtype have this one: buffers, the
weights of a BatchNorm, and what a stage declares (`zbpp.stage_api.declared_dtypes`). In a mixed precision
nothing that a checkpoint holds is rounded.

Data keep their values, too: floating-point inputs are float32. A layer of torch whose weights have 16 bits
casts a float32 input to their dtype, as under autocast and as FSDP2's cast_forward_inputs does. A norm that
subtracts a mean does so before: in bfloat16 999 and 1001 are one value.

Norms and softmax compute in float32 inside torch's kernels, whatever they are given. In a mixed precision the
loss and the metrics get the last stage's output in float32, unless they compute in float32 themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from zbpp.runtime.parameters import persistent_buffers
from zbpp.stage_api import declared_dtypes, mark_of
from zbpp.training.optim.master_weights import cast


class Precision(NamedTuple):
    """One row of the table. compute: the dtype of F and B.

    is_mixed: the optimizer updates float32 weights (masters, or FSDP2's shards), and F and B use 16-bit
    copies. is_scaled: the loss scale is dynamic.
    """

    name: str
    compute: torch.dtype
    is_mixed: bool = False
    is_scaled: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the weights that the optimizer updates."""
        return torch.float32 if self.is_mixed else self.compute

    def widened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A loss or metrics function (output, target), whose output mixed precision casts to float32.

        Not if the function does so itself, see `zbpp.stage_api.widens_itself`.
        """
        is_cast = self.is_mixed and not mark_of(function, "widens_itself")
        return InFloat32(function) if is_cast else function


_ALL = (
    Precision("float32", torch.float32),
    Precision("mixed_bfloat16", torch.bfloat16, is_mixed=True),
    Precision("mixed_float16", torch.float16, is_mixed=True, is_scaled=True),
    Precision("bfloat16", torch.bfloat16),
    Precision("float64", torch.float64),
)
PRECISIONS = {each.name: each for each in _ALL}


def give_dtypes(stage: nn.Module, precision: Precision, *, as_computed: bool = False) -> None:
    """Give the floating-point tensors of a stage their dtypes: see the top of this file. Call this once.

    as_computed: weights get what F and B compute with, else what the optimizer updates.
    """
    is_narrow = precision.compute.itemsize == 2
    declared = declared_dtypes(stage, precision.compute) if is_narrow else {}
    is_updated = precision.is_mixed and not as_computed
    for name, parameter in stage.named_parameters():
        if parameter.is_floating_point():
            cast(parameter, precision.stored if is_updated else declared.get(name, precision.stored))
    if is_narrow:
        let_layers_cast(stage)
    saved = {id(each) for _, each in persistent_buffers(stage)}
    for name, buffer in stage.named_buffers():
        if buffer.is_floating_point() and not (precision.is_mixed and id(buffer) in saved):
            buffer.data = buffer.data.to(declared.get(name, precision.stored))


def let_layers_cast(stage: nn.Module) -> None:
    """Let a stage's layers of torch take wider values than their 16-bit weights. Calls may repeat."""
    for layer in layers_of_torch(stage):
        layer.forward = MethodType(_in_dtype_of_weights, layer)


def layers_of_torch(stage: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward is torch's and reads weights: Linear, Conv2d, LayerNorm, ...

    A TransformerEncoderLayer has no weights of its own, but reads those of its children in an evaluation.
    """
    for module in stage.modules():
        is_own = "forward" in vars(module) or not type(module).forward.__module__.startswith("torch.nn.")
        weights = module.parameters(recurse=isinstance(module, nn.TransformerEncoderLayer))
        if not is_own and any(True for _ in weights):
            yield module


def _in_dtype_of_weights(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer of torch, which takes wider values in the dtype of its 16-bit weights.

    A bound method, not an object: Dynamo compares its function alone, so layers that are alike are compiled
    once. In a copy of the layer it is bound to the copy.
    """
    weighted = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
    # The dtype is asked now: masters and FSDP2 give the module other weights.
    weights = (each.dtype for each in weighted._parameters.values() if each is not None)
    dtype = next(weights, torch.float32)
    if dtype.itemsize == 2:
        if args and _is_wide(args[0]) and (norm := _NORMS.get(type(module).forward)):
            return norm(module, args[0]).to(dtype)
        args = tuple([_narrowed(each, dtype) for each in args])
        kwargs = kwargs and {name: _narrowed(each, dtype) for name, each in kwargs.items()}
    return type(module).forward(module, *args, **kwargs)


_in_dtype_of_weights.only_casts = True  # type: ignore[attr-defined]  # the rest is the class's forward
_in_dtype_of_weights.__name__ = "forward"  # a pickled layer gets the class's forward, by this name

_WIDE = (torch.float32, torch.float64)


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if type(value) is tuple:  # the states of an LSTM
        return tuple([_narrowed(each, dtype) for each in value])
    return value.to(dtype) if _is_wide(value) else value


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _WIDE


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return functional.layer_norm(x, norm.normalized_shape, *_affine(norm, x.dtype), norm.eps)


def _group_norm(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return functional.group_norm(x, norm.num_groups, *_affine(norm, x.dtype), norm.eps)


def _affine(norm: nn.LayerNorm | nn.GroupNorm, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = (None if each is None else each.to(dtype) for each in (norm.weight, norm.bias))
    return weight, bias


_NORMS: dict[Callable[..., Tensor], Callable[[Any, Tensor], Tensor]] = {
    nn.LayerNorm.forward: _layer_norm,
    nn.GroupNorm.forward: _group_norm,
}


def kept_in_float32(stage: nn.Module, precision: Precision) -> Iterator[nn.Parameter]:
    """The parameters of a stage that compute in float32 in a mixed precision, too."""
    declared = declared_dtypes(stage, precision.compute)
    named = stage.named_parameters()
    return (parameter for name, parameter in named if declared.get(name) == torch.float32)


class InFloat32(nn.Module):
    """A loss or metrics function (output, target) whose output argument is cast to float32 first.

    This is a module, so that train() and eval() reach the function if that is a module.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.num_targets = mark_of(function, "num_targets")  # see `zbpp.stage_api.mean_over`

    def forward(self, output: Any, target: Any) -> Any:
        """The function's result."""
        return self.function(tree_map(_widened, output), target)


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


# ----------------------------------------------------------------
# Dynamic loss scaling: float16 holds nothing below 6e-8, so gradients are computed times a large factor.

_KEYS = ("value", "num_good_steps")


class LossScaleError(RuntimeError):
    """Gradients overflow even with the smallest loss scale: training can't go on."""


class LossScale:
    """The factor on the loss of the next step, `value`: halved at an overflow, doubled after good steps.

    start: the first factor; choose a power of two, so that scaling and dividing it out are exact.
    growth_interval: after so many good steps in a row the factor is doubled. Raises ValueError if one of the
    two is below 1.

        used = pipeline.loss_scale = scale.value
        pipeline.step(x, target=y)
        norm = clip_grad_norm_(pipeline, max_norm * used)  # the same on every rank
        if norm.isfinite():
            for master in masters.parameters():
                master.grad /= used
            optimizer.step()
            masters.update()
        scale.update(is_finite=bool(norm.isfinite()))
    """

    def __init__(self, start: float = 65536.0, growth_interval: int = 2000) -> None:
        if not start >= 1 or growth_interval < 1:
            raise ValueError(
                f"LossScale(start={start}, growth_interval={growth_interval}): write numbers from 1 upwards"
            )
        self.value, self.growth_interval, self.num_good_steps = float(start), growth_interval, 0

    def update(self, *, is_finite: bool) -> None:
        """Choose the next step's factor. is_finite: whether the norm of the last step's gradients is finite.

        All ranks have the same norm, so they choose the same factor. Raises LossScaleError where the factor
        would fall below 1.
        """
        if not is_finite:
            self._halve()
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = 2 * self.value, 0

    def _halve(self) -> None:
        if self.value / 2 < 1:
            raise LossScaleError(
                f"the gradients are infinite or NaN with loss_scale={self.value:g}, and were at every larger "
                "scale before: the loss is not finite, or float16 is too narrow for this model; look at the "
                "losses and the data, or write precision=mixed_bfloat16"
            )
        self.value, self.num_good_steps = self.value / 2, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""
        return {key: getattr(self, key) for key in _KEYS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises KeyError if it lacks a key."""
        self.value, self.num_good_steps = (state[key] for key in _KEYS)
