"""Float32 master weights beside 16-bit compute weights, cast once per step.

    W         main_grad += dW          float32; the master's `.grad` is this tensor, not a copy
    optimizer master, states           float32
    update    parameter <- master      16 bits; F and B of the next step compute with it

With Adam each parameter takes 2 + 4 + 4 + 8 bytes: compute weight, main_grad, master, two states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """The float32 weights that an optimizer updates, for parameters that compute in 16 bits.

    parameters: of stages, or of any modules; a parameter that comes twice (a tied one) gets one master. A
    trainable parameter gets a float32 master with its present value, and a `main_grad`, where W sums its
    gradients; then its data are cast to `dtype`. A frozen parameter is cast, too; its present value stays in
    host memory, for `of`. Integers and buffers stay as they are. Make this object when the weights are on
    their device, in float32, before the first forward.

    keep: which of them compute in float32, as a BatchNorm's do. They share the memory of their masters.

        masters = MasterWeights(pipeline.parameters(), torch.bfloat16)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3)
        for x, y in batches:
            masters.zero_grad()
            pipeline.step(x, target=y)
            clip_grad_norm_(pipeline, 1.0)
            optimizer.step()
            masters.update()

    A parameter that the loss doesn't reach has the gradient 0, not None: weight decay still shrinks it.
    Raises ValueError for a dtype other than bfloat16 or float16, and for parameters that can't have a master.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, *, keep: Iterable[nn.Parameter] = ()
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype={dtype}: master weights are for torch.bfloat16 or torch.float16")
        given = list(dict.fromkeys(parameters))
        trained = [parameter for parameter in given if parameter.requires_grad]
        for parameter in trained:
            _check(parameter)
        self._masters = {parameter: _master_of(parameter) for parameter in trained}
        kept = set(keep)
        frozen = [each for each in given if each.is_floating_point() and not each.requires_grad]
        self._frozen = {each: _on_host(each) for each in frozen if each not in kept}
        self._frozen_versions = [value._version for value in self._frozen.values()]
        for parameter in given:
            if parameter.is_floating_point() and parameter not in kept:
                cast(parameter, dtype)
        for parameter, master in self._masters.items():
            parameter.main_grad = master.grad = torch.zeros_like(master)  # type: ignore[attr-defined]  # zbpp's
        self._versions = [parameter._version for parameter in trained]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters, for an optimizer; with the optimizer's states they are what a checkpoint has to hold.

        Whoever changes a master calls `update` afterwards.
        """
        return iter(self._masters.values())

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What a checkpoint holds of it: its master, a frozen one's value before the cast, or else itself."""
        return self._masters.get(parameter, self._frozen.get(parameter, parameter))

    def zero_grad(self) -> None:
        """Set the gradients to 0. Call this instead of the optimizer's zero_grad.

        That one sets `.grad` to None, and then the optimizer no longer sees the `main_grad` that W adds to.
        """
        plain = []
        for parameter, master in self._masters.items():
            master.grad = _main_grad(parameter)
            if type(master.grad) is Tensor:
                plain.append(master.grad)
            elif master.grad is not None:
                master.grad.zero_()  # _foreach_zero_ does not raise a DTensor's count of in-place changes
        if plain:
            torch._foreach_zero_(plain)

    @torch.no_grad()
    def update(self) -> None:
        """Cast the masters into the parameters. Call this once, after the optimizer's step.

        Raises RuntimeError if the optimizer had no gradients or not all of them, and if a parameter was
        changed from outside.
        """
        self._check_gradients()
        self.cast()

    @torch.no_grad()
    def cast(self) -> None:
        """`update` after something else than a step has changed the masters."""
        self._check_weights()
        weights = [_local(parameter) for parameter in self._masters]
        if weights:
            torch._foreach_copy_(weights, [_local(master) for master in self._masters.values()])
        self._versions = [parameter._version for parameter in self._masters]
        versions = [value._version for value in self._frozen.values()]
        if versions != self._frozen_versions:  # a checkpoint was loaded
            for parameter, value in self._frozen.items():
                _local(parameter).copy_(_local(value))
            self._frozen_versions = versions

    def _check_gradients(self) -> None:
        if any(master.grad is not _main_grad(parameter) for parameter, master in self._masters.items()):
            raise RuntimeError(
                "a master's .grad is not its parameter's main_grad, so the optimizer had no gradient: call "
                "MasterWeights.zero_grad() before each step, not optimizer.zero_grad()"
            )
        outside = [parameter for parameter in self._masters if parameter.grad is not None]
        if outside:
            raise RuntimeError(
                f"a parameter of shape {tuple(outside[0].shape)} has a gradient in .grad, which its master "
                "never gets: a backward outside of pipeline.step reached it, and only a step adds to "
                "main_grad: let the pipeline compute the loss, or give MasterWeights none of these parameters"
            )

    def _check_weights(self) -> None:
        if [parameter._version for parameter in self._masters] != self._versions:
            raise RuntimeError(
                "a parameter was changed (load_state_dict?), but its master was not, and update() would undo "
                "the change: load weights before MasterWeights is made, or write into the masters"
            )


def _check(parameter: nn.Parameter) -> None:
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is not None and "shard" in (mesh.mesh_dim_names or ()):
        raise ValueError(
            "a parameter is sharded by FSDP2, which gathers what forward computes with: leave MasterWeights "
            "out, and write Pipeline(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32))"
        )
    if not parameter.is_floating_point():
        raise ValueError(f"a trainable parameter of {parameter.dtype} can't have a float32 master: freeze it")


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 master with the parameter's value.

    It takes over the memory of a float32 parameter, which gets new memory when it is cast.
    """
    # .data, not .detach(): master and parameter must not share autograd's count of in-place changes.
    return nn.Parameter(parameter.data.to(torch.float32))


def _on_host(parameter: nn.Parameter) -> nn.Parameter:
    """The value of a frozen parameter, in host memory; of a DTensor where it is, for its collectives."""
    is_plain = not hasattr(parameter.data, "__tensor_flatten__")
    return nn.Parameter(parameter.data.to("cpu") if is_plain else parameter.data, requires_grad=False)


def _main_grad(parameter: nn.Parameter) -> Tensor | None:
    return getattr(parameter, "main_grad", None)


def cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of the parameter, which stays the same object."""
    if not hasattr(parameter.data, "__tensor_flatten__"):
        parameter.data = parameter.data.to(dtype)
        return
    # A subclass such as DTensor has its values in a tensor of its own, which `.data` does not change.
    cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
    vars(cast).update(vars(parameter))
    torch.utils.swap_tensors(parameter, cast)


def _local(tensor: Tensor) -> Tensor:
    """The tensor; of a DTensor the part that this rank holds, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
