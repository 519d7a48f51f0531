"""Sequences whose tokens are divided over the processes of the mesh's dimension "context".

Each process of a context group computes a contiguous part of each sequence of the same microbatches. In
attention heads are exchanged for tokens (zbpp/autograd/models/context.py), all else sees its own tokens only.
So to parameters the processes are replicas, or shards, with other data: gradients are averaged over them with
the others (mesh.py), and losses weigh each target alike (weights.py).

Which layers exchange, the stage says: a layer that mixes tokens holds a `Context`. A stage without any
declares `mixes_time = False`, or is refused. A stage may have a method `hold_contexts(connect)`, which gives
its layers their Contexts; connect(context) connects one to the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

import torch.distributed as dist
from torch import nn

from zbpp.autograd.models.context import Context, refusal_of_heads
from zbpp.autograd.models.exchange import stays
from zbpp.features.all_to_all import AllToAll
from zbpp.features.context.sequence_parts import SequenceParts
from zbpp.job.agreement import refuse_together
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature
from zbpp.runtime.processes.groups import close_groups, group_like
from zbpp.runtime.processes.mesh import CONTEXT, TENSOR
from zbpp.runtime.rank import Rank


class ContextParallel(Feature):
    """Divides the sequences of a call over a group, whose processes exchange heads for tokens in attention.

    Raises ValueError, on every process, for a stage that mixes tokens without a Context, for numbers of heads
    that the group doesn't divide, and for a loss that is not marked as a mean over targets.
    """

    name = "context_parallel"
    excludes = MappingProxyType(
        {
            "post_validation": "a step may begin again on some processes only; leave one of them out",
            "cuda_graphs": "it was not tried on GPUs yet; leave one of them out",
            "dynamic_shapes": "microbatches of different lengths were not tried yet; leave one of them out",
        }
    )

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        between = rank.place.context
        assert between is not None
        stages = {index: worker.module for index, worker in rank.workers.items()}
        self._group = group_like(between, rank.timeout)
        self._contexts: list[Context] = []
        refusal = ""
        try:
            self._hold(stages.values(), between)
            refusal = next(filter(None, self._refusals(rank, dist.get_world_size(between))), "")
        except ValueError as error:  # from a stage that was tried out
            refusal = str(error)
        refuse_together(refusal, rank.place.gather)
        for each in self._contexts:
            _connect(each, self._group)
        self._between, rank.groups[CONTEXT] = between, self._group
        self._parts = SequenceParts(self._group, has_inputs=0 in rank.workers)

    def take(self, call: Call) -> Call:
        """See Feature. Returns the call with this process's part of each sequence."""
        return self._parts.of(call)

    def give(self, call: Call, result: Result) -> Result:
        """See Feature. Returns the result of whole sequences, the same on all processes. Collective."""
        return self._parts.whole(call, result)

    def _hold(self, stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
        for stage in stages:
            hold = getattr(stage, "hold_contexts", None)
            if hold is not None:
                hold(lambda context: _connect(context, group))
            self._contexts += contexts_in(stage)

    def _refusals(self, rank: Rank, num: int) -> Iterator[str]:
        if any(bound % num for bound in rank.slice_bounds):
            nearest = [round(bound / num) * num for bound in rank.slice_bounds]
            yield (
                f"context={num} does not divide slice_bounds={list(rank.slice_bounds)}: each process has an "
                f"equal part of each slice, so write multiples, such as {nearest}"
            )
        tensor = rank.place.size(TENSOR)
        part = f" / tensor={tensor}" if tensor > 1 else ""
        for index, worker in rank.workers.items():
            stage = worker.module
            if not any(True for _ in contexts_in(stage)) and getattr(stage, "mixes_time", True):
                yield (
                    f"context={num}: stage {index} ({type(stage).__name__}) holds no Context, so its "
                    f"attention would see its own tokens only: let the layer exchange heads "
                    f"(zbpp/autograd/models/context.py), or write mixes_time = False in a stage whose "
                    f"layers treat each token alone"
                )
            for context in contexts_in(stage):
                for name, heads in context.heads.items():
                    yield refusal_of_heads(f"{name}{part}", heads // tensor, num)
        if rank.timetable.num_stages - 1 in rank.workers and rank.count is None:
            yield (
                f"context={num} divides the targets of a sequence, and the loss does not say that it is a "
                f"mean over them: mark it by zbpp.stage_api.mean_over_tokens, or by mean_over(count)"
            )

    def close(self) -> None:
        """See Extra. Stages that are used without the pipeline exchange over the mesh's group."""
        for each in self._contexts:
            _connect(each, self._between)
        close_groups([self._group])
        del self._group


def as_if_divided(stage: nn.Module, num: int) -> None:
    """Let a stage compute a part of each sequence, and exchange nothing: to measure memory with.

    Raises ValueError for heads that so many processes can't share.
    """
    hold = getattr(stage, "hold_contexts", None)
    if hold is not None:
        hold(None)
    for context in contexts_in(stage):
        for name, heads in context.heads.items():
            if refusal := refusal_of_heads(name, heads, num):
                raise ValueError(refusal)
        context.transfer, context.num_processes = stays, num


def contexts_in(stage: nn.Module) -> Iterator[Context]:
    """The Contexts inside a stage, each once."""
    return (each for each in stage.modules() if isinstance(each, Context))


def _connect(context: Context, group: dist.ProcessGroup) -> None:
    context.transfer = AllToAll(group, "attention")
    context.num_processes, context.index = dist.get_world_size(group), dist.get_rank(group)
