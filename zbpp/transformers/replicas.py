"""Several pipelines beside each other, each of which accelerate takes for one data-parallel process.

Its samplers give each pipeline its share of the batches. What the Trainer gathers over processes is gathered
over the ranks that hold the same stages, so num_items_in_batch counts the targets of all pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.job.agreement import gather
from zbpp.job.errors import communicating
from zbpp.runtime import make_mesh
from zbpp.runtime.processes.mesh import REPLICATE


class Replicas:
    """The pipelines of a job. Collective.

    count: how many there are; it divides the number of processes. device_type: of the stages. timeout:
    seconds that a wait may last. mesh: of all processes; None for one pipeline. index: of this process's
    pipeline.
    """

    def __init__(self, count: int, device_type: str, timeout: float) -> None:
        _tell_number(count)
        self.count, self.index, self.mesh = count, 0, None
        self._group: dist.ProcessGroup | None = None
        self.num_ranks = dist.get_world_size() // count if dist.is_initialized() else 1
        self._waits = True
        self._limit = timedelta(seconds=timeout)
        if count > 1:
            self.mesh = make_mesh(replicate=count, device_type=device_type)
            self.index = self.mesh.get_local_rank(REPLICATE)
            self._group = self._grouped(
                [[*range(i, i + count)] for i in range(0, self.num_ranks * count, count)]
            )

    def pipeline_group(self) -> dist.ProcessGroup | None:
        """A group of the ranks of this pipeline for values on the CPU; None for one rank. Collective."""
        if self.num_ranks == 1:
            return None
        world = dist.get_world_size()
        return self._grouped([[*range(index, world, self.count)] for index in range(self.count)])

    def _grouped(self, ranks: list[list[int]]) -> dist.ProcessGroup:
        group: dist.ProcessGroup
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo", timeout=self._limit)
        return group

    def gather(self, values: Any) -> Any:
        """What accelerate's gather returns where each pipeline is one process."""
        from accelerate.utils.operations import recursively_apply

        return recursively_apply(self._gathered, values, error_on_other_type=True)

    def pad(self, values: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """What accelerate's pad_across_processes returns where each pipeline is one process."""
        from accelerate.utils.operations import recursively_apply

        def padded(tensor: Tensor) -> Tensor:
            if dim >= tensor.dim():
                return tensor
            longest = int(self._gathered(torch.tensor(tensor.shape[dim])).max())
            shape = [*tensor.shape]
            shape[dim] = longest - shape[dim]
            fill = tensor.new_full(shape, pad_index)
            return torch.cat([fill, tensor] if pad_first else [tensor, fill], dim)

        return recursively_apply(padded, values, error_on_other_type=True)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all pipelines, which have one shape, one behind the other in the first dimension."""
        if self._group is None:
            return tensor
        mine = tensor.detach().cpu().reshape(tensor.shape or (1,)).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.count)]
        with communicating(f"rank {dist.get_rank()}, waiting for the other pipelines"):
            dist.all_gather(everyone, mine, group=self._group)
        return torch.cat(everyone).to(tensor.device)

    def mean(self, number: Tensor) -> Tensor:
        """The mean over the pipelines, of a tensor []."""
        return number if self._group is None else self._gathered(number).double().mean().to(number.dtype)

    def sum(self, number: int) -> int:
        """The sum over the pipelines."""
        return number if self._group is None else int(self._gathered(torch.tensor(number)).sum())

    def wait(self) -> None:
        """Wait for all processes of the job."""
        if self._waits and dist.is_initialized():
            dist.barrier()

    def tell(self, accelerator: Any, clip: Callable[..., Tensor]) -> None:
        """Let an accelerator do for pipelines what it does for processes. clip: its clip_grad_norm_.

        Loaders that it prepares from now on give this pipeline its share of the batches.
        """
        from accelerate.state import AcceleratorState

        AcceleratorState._shared_state["process_index"] = self.index
        accelerator.clip_grad_norm_ = clip
        accelerator.gather = self.gather
        accelerator.pad_across_processes = self.pad
        accelerator.wait_for_everyone = self.wait  # it would not wait
        if accelerator.scaler is not None:
            _share_overflows(accelerator.scaler)

    @contextmanager
    def as_processes(self) -> Iterator[None]:
        """The Trainer takes this process for the one with its pipeline's number: it seeds workers by it."""
        with _told(process_index=self.index):
            yield

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """accelerate takes this process for the only one, which waits for no other."""
        group, self._group, self._waits = self._group, None, False
        try:
            with _told(num_processes=1):
                yield
        finally:
            self._group, self._waits = group, True


def _tell_number(count: int) -> None:
    """accelerate takes the job for so many processes, whose models it does not wrap."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState()
    state.distributed_type, state.num_processes = DistributedType.NO, count


def _share_overflows(scaler: Any) -> None:
    """Let a GradScaler skip a step, and lower its scale, on all ranks if a gradient of one is not finite.

    torch's scaler for shards (ShardedGradScaler) replaces the same method.
    """
    own = scaler._unscale_grads_

    def unscaled(
        optimizer: torch.optim.Optimizer, inverse: Tensor, found: Tensor, *others: Any
    ) -> dict[torch.device, Tensor]:
        mine = own(optimizer, inverse, found, *others)  # empty on a rank without gradients
        is_any = any(gather(any(bool(each) for each in mine.values())))
        return {inverse.device: torch.full_like(found, float(is_any))}

    scaler._unscale_grads_ = unscaled


@contextmanager
def _told(**values: int) -> Iterator[None]:
    """Change what accelerate knows of the processes of the job."""
    from accelerate.state import AcceleratorState, PartialState

    states = [each for each in (PartialState._shared_state, AcceleratorState._shared_state) if each]
    before = [{name: state[name] for name in values} for state in states]
    try:
        for state in states:
            state.update(values)
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            state.update(old)
