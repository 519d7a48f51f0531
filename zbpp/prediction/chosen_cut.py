"""The cut of a run with model.layers_per_stage=auto, and with schedule=auto also its schedule.

Each layer is measured as if it were a stage: its products and its bytes. `zbpp.planning.choose_cut` compares
cuts at these costs. Whether the best one is within memory.limit is up to the prediction of the whole run,
which also counts buffers and temporary memory: what a rank needs beyond the layers' bytes is taken off its
limit, and the cut is chosen again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbpp.config import NUM_MICROBATCHES, ConfigError, TrainConfig, with_values
from zbpp.planning import ChosenCut, CutTooLarge, better_order, choose_cut, plan, timetables_of_families
from zbpp.planning.placement import PLACEMENTS
from zbpp.prediction.measured_stages import with_recompute
from zbpp.prediction.predictor import Predictor, as_typed, limit_that_holds
from zbpp.render import render_cut
from zbpp.run.cut import Changes, speeds_of, uncut
from zbpp.run.model import build_model, layers_per_stage
from zbpp.run.plan import build_timetable
from zbpp.schedule import Costs, Op, Timetable
from zbpp.schedule.costs import BYTES
from zbpp.schedule.interpret.stage_bytes import StageBytes

_ROUNDS = 5  # in which limits are lowered by what the layers' bytes leave out


@dataclass(frozen=True, kw_only=True)
class CutChoice:
    """The chosen cut of a run.

    changes: the keys that give the run this cut. found: the cut of `layers`, which are the model's layers,
    and its head as one more if a stage may have that alone. left: how many bytes they may fill on each rank.
    timetables: those that were compared.
    """

    changes: Changes
    found: ChosenCut
    layers: Sequence[Costs]
    speeds: Sequence[float]
    left: Sequence[float] | None
    timetables: Mapping[str, Timetable]

    @property
    def title(self) -> str:
        """The chosen keys as one types them."""
        schedule = f" schedule={self.changes['schedule.name']}" if "schedule.name" in self.changes else ""
        return f"model.layers_per_stage={as_typed(self.changes['model.layers_per_stage'])}{schedule}"

    def text(self) -> str:
        """What was chosen, what it brings, and whether another order of the ranks would bring more."""
        better = better_order(self.found, self.layers, self.speeds, self.left, self.timetables)
        return render_cut(self.found, self.title, self.speeds, better)


def chosen_cut(config: TrainConfig, num_ranks: int, predictor: Predictor | None = None) -> CutChoice:
    """Choose the cut for parallel.speeds and memory.limit.

    A named schedule stays, and schedule=auto leaves the choice between all families; without memory.limit,
    between those that hold no more activations than 1F1B. Raises ConfigError if no
    cut is within the limits (with those that would do), and PlanError as `choose_cut` does.
    """
    return _Choice(config, num_ranks, predictor or Predictor()).made()


class _Choice:
    """A choice while it is made."""

    def __init__(self, config: TrainConfig, num_ranks: int, predictor: Predictor) -> None:
        self._config, self._predictor, schedule = config, predictor, config.schedule
        self._speeds = speeds_of(config, num_ranks)
        self._limits = config.memory.limits(num_ranks)
        number = NUM_MICROBATCHES if config.num_microbatches is None else config.num_microbatches
        if schedule.replan is None:
            timetable = build_timetable(schedule, num_ranks, config.num_microbatches)
            number, self._timetables = timetable.num_microbatches, {schedule.name: timetable}
        else:
            placements = PLACEMENTS if schedule.placement is None else (schedule.placement,)
            is_limited = self._limits is not None
            self._timetables = timetables_of_families(num_ranks, number, placements, is_limited=is_limited)
        self._number = number
        self._layers, self._is_head_alone = _layers(config, num_ranks, number, predictor)

    def made(self) -> CutChoice:
        """Choose; a cut beyond the limits is chosen again, within less."""
        if self._limits is None:
            return self._chosen(self._found(None), None)
        left = self._limits
        for _ in range(_ROUNDS):
            is_least = False
            try:
                found = self._found(left)
            except CutTooLarge as error:
                found, is_least = error.least, True
            choice = self._chosen(found, left)
            run = with_values(self._config, choice.changes)
            peaks = [each.peak for each in self._predictor.predict(run, found.timetable).ranks]
            excess = [max(0.0, peak - limit) for peak, limit in zip(peaks, self._limits, strict=True)]
            if not any(excess):
                return choice
            if is_least:
                break
            left = [max(1.0, each - more) for each, more in zip(left, excess, strict=True)]
        given = self._config.memory.limit
        raise ConfigError(
            f"memory.limit={as_typed(given)}: no cut is within it; the one that exceeds it least, "
            f"{choice.title}, needs memory.limit={limit_that_holds(peaks, given)}"
        )

    def _found(self, limits: Sequence[float] | None) -> ChosenCut:
        options: dict[str, Any] = {"timetables": self._timetables, "time_limit": 0}
        return choose_cut(self._layers, self._speeds, self._number, limits, **options)

    def _chosen(self, found: ChosenCut, left: Sequence[float] | None) -> CutChoice:
        *others, last = found.layers_per_stage
        changes: Changes = {"model.layers_per_stage": [*others, last - self._is_head_alone]}
        if self._config.schedule.replan is not None:
            changes |= {"schedule.name": found.schedule}
            changes |= {"schedule.placement": None, "schedule.stages_per_rank": None}
        return CutChoice(
            changes=changes,
            found=found,
            layers=self._layers,
            speeds=self._speeds,
            left=left,
            timetables=self._timetables,
        )


def _layers(
    config: TrainConfig, num_ranks: int, num_microbatches: int, predictor: Predictor
) -> tuple[list[Costs], bool]:
    """(the costs of each layer, whether the last one is the head, which counts as no layer)."""
    even = uncut(config)
    number = sum(layers_per_stage(build_model(even.model, even.seed), num_ranks) or ())
    finest = [1] * number
    is_head_alone = _may_be(even, [*finest, 0])
    finest += [0] * is_head_alone
    cut = with_values(even, {"model.layers_per_stage": finest, "schedule.slices": None})
    measured, recomputed = predictor.measure(cut, plan("1f1b", len(finest), num_microbatches))
    times = with_recompute(measured.costs_at(), recomputed, len(finest)).per_stage(len(finest)).duration
    return [
        _of_layer(stage, times[Op.F][index], times[Op.B][index], times[Op.W][index])
        for index, stage in enumerate(measured.stages)
    ], is_head_alone


def _may_be(config: TrainConfig, counts: list[int]) -> bool:
    """Whether the model can be cut so."""
    cut = with_values(config, {"model.layers_per_stage": counts})
    try:
        layers_per_stage(build_model(cut.model, cut.seed), len(counts))
    except ConfigError:
        return False
    return True


def _of_layer(stage: StageBytes, f: float, b: float, w: float) -> Costs:
    """The costs of a layer inside a stage. What would be its messages are tensors that the stage keeps."""
    kept_for_w = [(stage.x, stage.x_until), (stage.g, stage.g_until)]
    return Costs(
        f=f,
        b=b,
        w=w,
        saved=stage.saved + stage.x,
        deferred=stage.deferred + sum(size for size, until in kept_for_w if until == Op.W),
        static=stage.static - (stage.gradients if stage.releases else 0.0),
        memory_unit=BYTES,
    )
