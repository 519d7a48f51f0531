"""The cut of a model whose fullest rank holds the fewest bytes.

`zbpp.partition` makes the heaviest stage as light as possible, in time. In memory another cut may be better:
a rank that runs ahead holds more microbatches, and the ranks with the embedding and the head hold weights
that no layer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from zbpp.prediction.measured_stages import MeasuredStages
from zbpp.schedule import Program
from zbpp.schedule.interpret.stage_bytes import StageBytes

# Bytes that grow with the number of a stage's layers.
_PER_LAYER = (
    *("weights", "gradients", "optimizer", "gathered", "reduced", "copies"),
    *("saved", "deferred", "leaves", "past", "past_gradients"),
)


def lightest_cut(measured: MeasuredStages, programs: Sequence[Program], counts: Sequence[int]) -> list[int]:
    """How many layers each stage should get, so that the highest peak of all ranks is the lowest.

    measured: the stages of the cut `counts`. programs: of all ranks. A layer's bytes are those of a stage
    between the first and the last, divided by its layers; so the stages of another cut are estimates. A local
    search moves one layer at a time from the fullest rank to the emptiest one, while that lowers the highest
    peak. Returns `counts` itself if no move does, or if the pipeline has no stage between the first and the
    last.
    """
    search = _Search(measured, programs, list(counts))
    return search.run() if len(programs) > 1 and len(counts) > 2 else list(counts)


class _Search:
    def __init__(self, measured: MeasuredStages, programs: Sequence[Program], counts: list[int]) -> None:
        self._measured, self._programs, self._given = measured, programs, counts
        self._stages_of = [sorted({action.stage for action in each.row}) for each in programs]
        self._peaks: dict[tuple[int, ...], float] = {}  # by rank and the counts of its stages

    def run(self) -> list[int]:
        counts, peaks = self._given, self._ranks(self._given)
        while moved := list(self._moves(counts, peaks)):
            best = min(moved, key=lambda each: max(self._ranks(each)))
            if max(self._ranks(best)) >= max(peaks):
                break
            counts, peaks = best, self._ranks(best)
        return counts

    def _moves(self, counts: list[int], peaks: Sequence[float]) -> Iterator[list[int]]:
        """The cuts with one layer less on the fullest rank and one more on the emptiest."""
        emptiest, *_, fullest = sorted(range(len(peaks)), key=peaks.__getitem__)
        for giver in self._stages_of[fullest]:
            if counts[giver] > 1:
                for taker in self._stages_of[emptiest]:
                    moved = counts.copy()
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield moved

    def _ranks(self, counts: list[int]) -> list[float]:
        """The peak of each rank."""
        found = []
        for rank, stages in enumerate(self._stages_of):
            key = rank, *(counts[stage] for stage in stages)
            if key not in self._peaks:
                self._peaks[key] = self._peak(rank, counts)
            found.append(self._peaks[key])
        return found

    def _peak(self, rank: int, counts: list[int]) -> float:
        stages = [self._stage(stage, count) for stage, count in enumerate(counts)]
        (memory,) = self._measured._replace(stages=stages).predicted([self._programs[rank]])
        return memory.peak

    def _stage(self, stage: int, count: int) -> StageBytes:
        """The stage with `count` layers."""
        own, more = self._measured.stages[stage], count - self._given[stage]
        middle = max(range(1, len(self._given) - 1), key=self._given.__getitem__)
        layer, num = self._measured.stages[middle], self._given[middle]
        changed: dict[str, Any] = {
            name: getattr(own, name) + more * getattr(layer, name) / num
            for name in _PER_LAYER
            if getattr(own, name) is not None and getattr(layer, name) is not None
        }
        pairs = zip(own.slices, layer.slices, strict=True)
        changed["slices"] = tuple(
            replace(
                mine,
                saved=mine.saved + more * theirs.saved / num,
                deferred=mine.deferred + more * theirs.deferred / num,
            )
            for mine, theirs in pairs
        )
        return replace(own, **changed) if more else own
