"""The extras of every pipeline: checks, compilation, and the features of its stages and of its mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zbpp.devices import is_accelerator
from zbpp.job.cuda_settings import check_launches, use_expandable_segments, warn_of_lazy_loading
from zbpp.runtime.extra import Extra, extras_of
from zbpp.runtime.processes.mesh import EXPERT, TENSOR, Reshard
from zbpp.runtime.rank import Rank


def standard_extras(rank: Rank, reshard: Reshard, mp_policy: Any) -> Iterator[Sequence[Extra]]:
    """Yield the extras in the order in which they are attached; every process yields as many sequences.

    After each sequence the processes agree that none of them refuses it. reshard, mp_policy: as in Pipeline.
    """
    # Imported when a pipeline is made: their files import zbpp.runtime, which names this function.
    from zbpp.features.context.context import ContextParallel
    from zbpp.features.experts.experts import ExpertParallel
    from zbpp.features.graphs.compile_ahead import CompileAhead
    from zbpp.features.reductions.reductions import Reductions
    from zbpp.features.reductions.shared_hooks import SharedHooks
    from zbpp.features.slices.sequence_slices import SequenceSlices
    from zbpp.observers.batch_norms import BatchNorms
    from zbpp.observers.full_device import FullDevice
    from zbpp.observers.losses_alike import LossesAlike
    from zbpp.observers.same_calls import SameCalls

    yield [SameCalls(), BatchNorms(), SharedHooks()]
    if rank.receives_on_device and is_accelerator(rank.device):
        check_launches()
        if rank.index == 0:
            warn_of_lazy_loading()
        use_expandable_segments()
        yield [FullDevice()]
    yield extras_of(worker.module for worker in rank.workers.values())
    if rank.slice_bounds:
        yield [SequenceSlices()]
    else:  # F of a slice is given the slice, too, which is not known ahead
        yield [CompileAhead()]
    if EXPERT in rank.place.expert_groups:
        yield [ExpertParallel()]
    if rank.place.context is not None:
        yield [ContextParallel()]
    yield [Reductions(reshard=reshard, mp_policy=mp_policy)]
    if TENSOR in rank.place.groups:
        yield [LossesAlike()]
