"""Several pipelines beside each other, each of which accelerate takes for one data-parallel process.

Its samplers give each pipeline its share of the batches. What the Trainer gathers over processes is gathered
over the ranks that hold the same stages, so num_items_in_batch counts the targets of all pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.job.errors import communicating
from zbpp.runtime import Pipeline, make_mesh
from zbpp.runtime.mesh import REPLICATE


class Replicas:
    """The pipelines of a job. Collective.

    count: how many there are; it divides the number of processes. device_type: of the stages. timeout:
    seconds that a wait may last. mesh: of all processes; None for one pipeline. index: this process's pipeline.
    """

    def __init__(self, count: int, device_type: str, timeout: float) -> None:
        self.count, self.index, self.mesh, self._group = count, 0, None, None
        self.num_ranks = dist.get_world_size() // count if dist.is_initialized() else 1
        if count > 1:
            self.mesh = make_mesh(replicate=count, device_type=device_type)
            self.index = self.mesh.get_local_rank(REPLICATE)
        self._limit = timedelta(seconds=timeout)
        if count > 1:
            self._group = self._grouped(
                [[*range(i, i + count)] for i in range(0, self.num_ranks * count, count)]
            )

    def pipeline_group(self) -> dist.ProcessGroup | None:
        """A group of the ranks of this pipeline for values on the CPU; None for one rank. Collective."""
        if self.num_ranks == 1:
            return None
        world = dist.get_world_size()
        return self._grouped([[*range(index, world, self.count)] for index in range(self.count)])

    def _grouped(self, ranks: list[list[int]]) -> Any:
        return dist.new_subgroups_by_enumeration(ranks, backend="gloo", timeout=self._limit)[0]

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

    def begin_alike(self, pipeline: Pipeline) -> None:
        """Give all pipelines the values of the first one, as DistributedDataParallel does."""
        if self.mesh is None:
            return
        group = self.mesh.get_group(REPLICATE)
        with torch.no_grad():
            for stage in pipeline.stages.values():
                for each in (*stage.parameters(), *stage.buffers()):
                    dist.broadcast(each, group=group, group_src=0)

    @contextmanager
    def as_processes(self) -> Iterator[None]:
        """accelerate takes this process for the one with the number of its pipeline: samplers are made so."""
        with _told(process_index=self.index):
            yield

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """accelerate takes the job for one process: files are those of one."""
        with _told(num_processes=1):
            yield


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
