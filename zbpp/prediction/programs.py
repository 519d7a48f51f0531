"""The programs of a configured run: its timetable, lowered, with what the run's features put into a step."""

from __future__ import annotations

from collections.abc import Sequence

from zbpp.config import TrainConfig
from zbpp.features.activation_offload.copies import RankOffload, with_copies
from zbpp.features.gradient_release.updates import with_accumulation, with_updates
from zbpp.features.post_validation.gate import gate_of, with_gate
from zbpp.schedule import Program, Timetable, lower

_RELEASES = {"step": with_updates, "accumulate": with_accumulation}


def step_programs(
    config: TrainConfig, timetable: Timetable, offload: Sequence[RankOffload] = ()
) -> list[Program]:
    """The program of each rank. offload: for each rank, its round trips; () without offload."""
    lowered = lower(timetable)
    programs = [*lowered]
    if offload:
        programs = [*map(with_copies, programs, offload)]
    if (release := _RELEASES.get(config.memory.gradient_release)) is not None:
        programs = [*map(release, programs)]
    if config.optimizer.validation == "after":
        programs = [with_gate(program, gate_of(lowered, program.rank)) for program in programs]
    return programs
