"""The programs of a configured run: its timetable, lowered, with what the run's features put into a step.

The passes are those of the features themselves, in the order in which a run gives the features to its
pipeline (zbpp/features/standard.py, then build_pipeline and the trainer). tests/test_predicted_memory.py
compares these programs with those of real runs, line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

from zbpp.config import TrainConfig
from zbpp.features.activation_offload.copies import RankOffload, with_copies
from zbpp.features.fewer_bytes.fewer_bytes import chosen_boundaries, with_codes
from zbpp.features.gradient_release.updates import with_accumulation, with_updates
from zbpp.features.head_at_once.head_w import with_head_w
from zbpp.features.messages_ahead.messages_ahead import with_more_in_flight
from zbpp.features.post_validation.gate import gate_of, with_gate
from zbpp.features.reductions.instructions import with_reductions
from zbpp.run.plan import costs_of, messages_ahead_of
from zbpp.schedule import Program, Programs, Timetable, lower

Pass = Callable[[Program], Program]

_RELEASES: dict[str, Pass] = {"step": with_updates, "accumulate": with_accumulation}


def step_programs(
    config: TrainConfig, timetable: Timetable, offload: Sequence[RankOffload] = ()
) -> list[Program]:
    """The program of each rank, before receives are started.

    offload: for each rank, its round trips; () without offload.
    """
    lowered = lower(timetable)
    ahead = messages_ahead_of(config, timetable, costs_of(config.schedule, timetable))
    return [
        reduce(lambda program, each: each(program), _passes(config, lowered, rank, offload, ahead), program)
        for rank, program in enumerate(lowered)
    ]


def encoded_boundaries(config: TrainConfig, num_stages: int) -> Sequence[int]:
    """The boundaries over which messages are encoded."""
    parallel = config.parallel
    return () if parallel.messages == "exact" else chosen_boundaries(parallel.message_boundaries, num_stages)


def _passes(
    config: TrainConfig, lowered: Programs, rank: int, offload: Sequence[RankOffload], ahead: int
) -> Iterator[Pass]:
    """The passes of a rank's program, in order. ahead: messages more that each link holds."""
    parallel, timetable = config.parallel, lowered.timeline.timetable
    is_reduced = parallel.replicate > 1 or parallel.shard > 1 or parallel.context > 1
    yield partial(with_reductions, stages=timetable.stages_of(rank) if is_reduced else ())
    if offload:
        yield partial(with_copies, placed=offload[rank])
    if config.memory.head_at_once:
        yield partial(with_head_w, stage=timetable.num_stages - 1)
    if ahead:
        yield partial(with_more_in_flight, number=ahead)
    if boundaries := encoded_boundaries(config, timetable.num_stages):
        yield partial(with_codes, num_stages=timetable.num_stages, boundaries=boundaries)
    if (release := _RELEASES.get(config.memory.gradient_release)) is not None:
        yield release
    if config.optimizer.validation == "after":
        yield partial(with_gate, gate=gate_of(lowered, rank))
