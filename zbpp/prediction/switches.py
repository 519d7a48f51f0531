"""How much memory each switch of a run saves, what it costs in time, and which switches make the run fit.

The saving is the difference of two predictions, without the switch and with it (predictor.py). The cost
is the simulated time of a step with the switch: the times of F, B and W are those in schedule.costs; without
schedule.costs they are in proportion to the products of each stage (measure/products.py). Recompute adds the
time of F to B. Copies of activations to the host and back run as planned, at the speed of `host` in
schedule.costs: the time of copying the tensors that F of one microbatch saves. Copies of offloaded weights
are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from zbpp.config import ConfigError, TrainConfig, with_values
from zbpp.prediction.chosen_cut import chosen_cut
from zbpp.prediction.cut import lightest_cut
from zbpp.prediction.measured_stages import with_recompute
from zbpp.prediction.predictor import Prediction, Predictor, as_typed
from zbpp.prediction.programs import step_programs
from zbpp.render import in_bytes, render_limit, render_memory, render_short_w, render_switches
from zbpp.run.checks import check_together
from zbpp.run.cut import check_cut
from zbpp.run.model import cut_that_may_change
from zbpp.run.stages import pipeline_ranks
from zbpp.schedule import PlanError
from zbpp.schedule.interpret.memory import excess
from zbpp.schedule.interpret.timing import program_timeline

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min")
_DELAY_W = ("zb_h1", "zb_h2")  # which gains nothing where adapters train
_MOST_SHOWN = 5  # switches in the text
_MANY = 6  # consecutive steps that are simulated with post-validation
Changes = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class SwitchedRun:
    """A run with some switches changed.

    step: ms. why: why the run is refused; then prediction and step are None.
    """

    changes: Changes
    prediction: Prediction | None = None
    step: float | None = None
    note: str = ""  # what the time of the step leaves out
    why: str = ""

    @property
    def title(self) -> str:
        """The changes as one types them on the command line."""
        return title_of(self.changes)

    @property
    def peak(self) -> float:
        """The highest peak of all ranks; infinity for a run that is refused."""
        ranks = self.prediction.ranks if self.prediction else []
        return max((each.peak for each in ranks), default=float("inf"))

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether every rank stays within its limit."""
        ranks = self.prediction.ranks if self.prediction else []
        return bool(ranks) and not excess(ranks, limits)


def _num_ranks(config: TrainConfig) -> int:
    return pipeline_ranks(config.parallel, config.parallel.num_processes or 1)


def title_of(changes: Changes) -> str:
    """The changes as one types them on the command line."""
    typed = (f"{key}={_typed(value)}" for key, value in changes.items())
    return " ".join(typed).replace("schedule.name=", "schedule=") or "as configured"


def _typed(value: Any) -> str:
    """A value as one types it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


class Switches:
    """The runs that differ from `config` in one switch or in several.

    chosen: the cut of a config with model.layers_per_stage=auto. Runs with another schedule have a cut of
    their own, and all others have this one.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._predictor = Predictor()
        self.chosen = chosen_cut(config, _num_ranks(config), self._predictor) if config.asks_for_cut else None
        self._config = config if self.chosen is None else with_values(config, self.chosen.changes)

    def row(self, changes: Changes | None = None) -> SwitchedRun:
        """The run with these changes."""
        changes = changes or {}
        try:
            config = changed(self._config, changes)
            if config.asks_for_cut:
                config = with_values(config, chosen_cut(config, _num_ranks(config), self._predictor).changes)
            prediction = self._predictor.predict(config)
            return SwitchedRun(changes, prediction, *_step_ms(config, prediction))
        except (ConfigError, PlanError) as error:
            return SwitchedRun(changes, why=str(error))

    def others(self, own: SwitchedRun) -> list[SwitchedRun]:
        """One run for each value of each switch by itself. own: the configured run."""
        console = Console(stderr=True)
        with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
            cut = [] if own.prediction is None else self._cut(own.prediction)
            choices = [*cut, *self.choices()]
            return [*map(self.row, progress.track(choices, description="switches"))]

    def _cut(self, own: Prediction) -> list[Changes]:
        """The change to the cut with the lowest peak; [] if the run has it, or the model can't take it."""
        config = self._config
        counts = cut_that_may_change(config, own.timetable.num_stages)
        if counts is None:
            return []
        lightest = lightest_cut(own.measured, step_programs(config, own.timetable), counts)
        return [] if lightest == counts else [{"model.layers_per_stage": lightest}]

    def choices(self) -> Iterator[Changes]:
        """The changes that turn on a switch that is off: those that save memory; last, post-validation."""
        config, memory = self._config, self._config.memory
        if config.schedule.timetable is None:
            own = config.schedule.name
            cut = {} if self.chosen is None else {"schedule.replan": None, "model.layers_per_stage": "auto"}
            names = [name for name in SCHEDULES if not (config.finetune.lora and name in _DELAY_W)]
            yield from ({"schedule.name": name, **cut} for name in names if name != own)
            if config.finetune.is_on:  # W is short: these shorten the step, and delaying W does not
                yield {"schedule.name": "interleaved_1f1b", "schedule.stages_per_rank": 4, **cut}
                if config.schedule.slices is None:
                    yield {"schedule.name": "zb_v", "schedule.slices": 4, **cut}
        if memory.recompute == "none" and config.compile == "none":
            names = ["block"] if memory.limit is None else ["block", "auto"]
            yield from ({"memory.recompute": name} for name in names)
        if config.parallel.shard > 1 and config.parallel.reshard != "microbatch":
            yield {"parallel.reshard": "microbatch"}
        if memory.offload == "none" and not memory.offload_weights:
            yield {"memory.offload": "auto"}
        if not memory.offload_weights:
            yield {"memory.offload_weights": True}
        if not memory.head_at_once:
            yield {"memory.head_at_once": True}
        if memory.gradient_release == "off":
            unclipped = {} if config.optimizer.clip_norm is None else {"optimizer.clip_norm": None}
            yield {"memory.gradient_release": "step", **unclipped}
        if config.optimizer.validation == "before":  # it costs memory, and shortens the step
            yield {"optimizer.validation": "after"}


def _step_ms(config: TrainConfig, prediction: Prediction) -> tuple[float, str]:
    """(the time of a step in ms, a note on what the time leaves out)."""
    programs, costs = prediction.programs, prediction.costs
    if prediction.recomputed:
        costs = with_recompute(costs, prediction.recomputed, prediction.timetable.num_stages)
    note = "copies of weights are not counted" if config.memory.offload_weights else ""
    if config.optimizer.validation == "after":
        many = (program_timeline(programs, costs, num_steps=num).makespan for num in (_MANY, _MANY // 2))
        longer, shorter = many
        return (longer - shorter) / (_MANY - _MANY // 2), note
    return program_timeline(programs, costs).makespan, note


def changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    """The config with other values. Raises ConfigError for values that don't go together.

    Another schedule has the placement and the stages per rank that are its own.
    """
    own_shape = {"schedule.placement": None, "schedule.stages_per_rank": None}
    is_other = any(key.startswith("schedule.") for key in changes)
    made: TrainConfig = with_values(config, {**(own_shape if is_other else {}), **changes})
    return made


# ---------------------------------------------------------------- as text


def memory_text(config: TrainConfig) -> Iterator[str]:
    """The output of `zbpp memory`, part by part. Raises ConfigError at the end if nothing fits the limit."""
    check_together(config)
    check_cut(config, _num_ranks(config))
    switches = Switches(config)
    if switches.chosen is not None:
        yield switches.chosen.text()
    own = switches.row()
    if own.prediction is None:
        raise ConfigError(own.why)
    limits = config.memory.limits(len(own.prediction.ranks))
    yield render_memory(own.prediction.ranks, own.prediction.how)
    if limits is not None:
        yield render_limit(own.prediction.ranks, limits)
    others = switches.others(own)
    yield render_switches([_cells(each, own) for each in (own, *others)])
    f, b, w = (sum(getattr(each, op) for each in own.prediction.measured.products) for op in ("f", "b", "w"))
    if note := render_short_w(f, b, w):
        yield note
    if limits is not None and not own.fits(limits):
        yield _what_fits(others, config.memory.limit, limits)


def _what_fits(rows: Sequence[SwitchedRun], given: Any, limits: Sequence[float]) -> str:
    """Which switches make it fit. given: memory.limit. Raises ConfigError if none does by itself."""
    fitting = sorted(
        (each for each in rows if each.fits(limits)), key=lambda each: (each.step or 0.0, each.peak)
    )
    if not fitting:
        least = min(rows, key=lambda each: each.peak)
        raise ConfigError(
            f"memory.limit={as_typed(given)}: no switch makes it fit by itself; the lowest peak is that of "
            f"{least.title}: write this, and call zbpp memory again"
        )
    first = ["one of these switches makes it fit, the shortest step first:"]
    return "\n".join(first + [f"  {each.title}   ({in_bytes(each.peak)})" for each in fitting[:_MOST_SHOWN]])


def _cells(row: SwitchedRun, own: SwitchedRun) -> dict[str, str]:
    if row.prediction is None or row.step is None or own.step is None:
        return {
            "switch": row.title,
            "peak": "",
            "saves": "",
            "time": "",
            "note": row.why.removeprefix(f"{row.title}: "),
        }
    saved = own.peak - row.peak
    share = f"{'-' if saved < 0 else ''}{in_bytes(abs(saved))}" if row is not own else ""
    time = f"x {row.step / own.step:.2f}"
    return {"switch": row.title, "peak": in_bytes(row.peak), "saves": share, "time": time, "note": row.note}
