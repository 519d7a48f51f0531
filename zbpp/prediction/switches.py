"""How much memory each switch of a run saves, what it costs in time, and which switches make the run fit.

The saving is the difference of two predictions, without the switch and with it (predictor.py). The cost
is the simulated time of a step with the switch: the times of F, B and W are those in schedule.costs; without
schedule.costs they are in proportion to the products of each stage (measure/products.py). Recompute adds the
time of F to B. Copies of activations to the host and back run as planned, at the speed of `host` in
schedule.costs: the time of copying the tensors that F of one microbatch saves. Copies of offloaded weights
are not counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from zbpp.config import ConfigError, TrainConfig
from zbpp.prediction.cut import lightest_cut
from zbpp.prediction.predictor import Prediction, Predictor
from zbpp.prediction.programs import step_programs
from zbpp.render import in_bytes, render_limit, render_memory, render_switches
from zbpp.run.model import build_model, layers_per_stage
from zbpp.schedule import Costs, Op, PlanError
from zbpp.schedule.interpret.memory import excess
from zbpp.schedule.interpret.timing import program_timeline

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min")
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

    def fits(self, limit: float) -> bool:
        """Whether every rank stays within the limit."""
        ranks = self.prediction.ranks if self.prediction else []
        return bool(ranks) and not excess(ranks, [limit] * len(ranks))


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
    """The runs that differ from `config` in one switch or in several."""

    def __init__(self, config: TrainConfig, predictor: Predictor | None = None) -> None:
        self._config, self._predictor = config, predictor or Predictor()

    def row(self, changes: Changes | None = None) -> SwitchedRun:
        """The run with these changes."""
        changes = changes or {}
        try:
            config = changed(self._config, changes)
            prediction = self._predictor.predict(config)
            return SwitchedRun(changes, prediction, *_step_ms(config, prediction))
        except (ConfigError, PlanError) as error:
            return SwitchedRun(changes, why=str(error))

    def single(self) -> list[SwitchedRun]:
        """The configured run, then one run for each value of each switch by itself."""
        console = Console(stderr=True)
        with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
            own = self.row()
            cut = [] if own.prediction is None else self._cut(own.prediction)
            choices = [*cut, *self._choices()]
            return [own, *map(self.row, progress.track(choices, description="switches"))]

    def _cut(self, own: Prediction) -> list[Changes]:
        """The change to the cut with the lowest peak; [] if the run has it, or the model can't take it."""
        config = self._config
        model = build_model(config.model, config.seed, config.finetune)
        counts = layers_per_stage(model, own.timetable.num_stages)
        if counts is None or "layers_per_stage" not in inspect.signature(type(model)).parameters:
            return []
        lightest = lightest_cut(own.measured, step_programs(config, own.timetable), counts)
        return [] if lightest == counts else [{"model.layers_per_stage": lightest}]

    def _choices(self) -> Iterator[Changes]:
        """The changes that turn on a switch that is off: those that save memory; last, post-validation."""
        config, memory = self._config, self._config.memory
        if config.schedule.timetable is None:
            own = config.schedule.name
            yield from ({"schedule.name": name} for name in SCHEDULES if name != own)
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
        costs = _with_recompute(costs, prediction.recomputed, prediction.timetable.num_stages)
    note = "copies of weights are not counted" if config.memory.offload_weights else ""
    if config.optimizer.validation == "after":
        many = (program_timeline(programs, costs, num_steps=num).makespan for num in (_MANY, _MANY // 2))
        longer, shorter = many
        return (longer - shorter) / (_MANY - _MANY // 2), note
    return program_timeline(programs, costs).makespan, note


def _with_recompute(costs: Costs, stages: Collection[int], num_stages: int) -> Costs:
    """The costs when these stages recompute: the time of F is added to their B and BW."""
    times = costs.per_stage(num_stages).duration
    f = [time if stage in stages else 0.0 for stage, time in enumerate(times[Op.F])]
    b, bw = ([time + more for time, more in zip(times[op], f, strict=True)] for op in (Op.B, Op.BW))
    return replace(costs, b=b, bw=bw)


def changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    """The config with other values. Raises ConfigError for values that don't go together."""
    groups: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        if name:
            groups.setdefault(group, {})[name] = value
        else:
            plain[key] = value
    made: dict[str, Any] = {
        group: _replaced(getattr(config, group), values) for group, values in groups.items()
    }
    if "schedule" in made:
        made["schedule"] = replace(made["schedule"], placement=None, stages_per_rank=None)
    return replace(config, **made, **plain)


def _replaced(group: Any, values: dict[str, Any]) -> Any:
    # The model's node is a dict, since its keys are those of the user's class.
    return {**group, **values} if isinstance(group, dict) else replace(group, **values)


# ---------------------------------------------------------------- as text


def memory_text(config: TrainConfig) -> Iterator[str]:
    """The output of `zbpp memory`, part by part. Raises ConfigError at the end if nothing fits the limit."""
    switches = Switches(config)
    own, *others = switches.single()
    if own.prediction is None:
        raise ConfigError(own.why)
    yield render_memory(own.prediction.ranks, own.prediction.how)
    yield render_switches([_cells(each, own) for each in (own, *others)])
    limit = None if config.memory.limit is None else config.memory.limit * 2**30
    if limit is not None:
        yield render_limit(own.prediction.ranks, [limit] * len(own.prediction.ranks))
        if not own.fits(limit):
            yield _what_fits(others, limit)


def _what_fits(rows: Sequence[SwitchedRun], limit: float) -> str:
    """Which switches make it fit. Raises ConfigError if none does by itself."""
    fitting = sorted(
        (each for each in rows if each.fits(limit)), key=lambda each: (each.step or 0.0, each.peak)
    )
    if not fitting:
        least = min(rows, key=lambda each: each.peak)
        raise ConfigError(
            f"memory.limit={limit / 2**30:g}: no switch makes it fit by itself; the lowest peak is that of "
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
