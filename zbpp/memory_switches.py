"""What each switch of a training run would save and cost, and which switches make it fit.

The saving is predicted by the same arithmetic with the switch on. The cost is the simulated step: with the
times in schedule.costs, or else with F, B and W of equal length; a recompute adds its F to B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from zbpp.builders.model import build_model
from zbpp.builders.parallel import pipeline_ranks
from zbpp.builders.plan import build_timetable, check_layers
from zbpp.config import ConfigError, TrainConfig
from zbpp.planning import RankCosts, canonical_name, read_costs
from zbpp.planning.memory_budget import excess
from zbpp.planning.recompute import with_recompute
from zbpp.predict_memory import Prediction, Predictor
from zbpp.render import in_bytes, render_limit, render_memory, render_switches
from zbpp.schedule import Costs, PlanError, Timetable, simulate

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min")
_MOST_SHOWN = 5  # combinations that fit
Changes = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class Row:
    """A run with some switches changed; prediction and step (ms) are None if it is refused, see why."""

    changes: Changes
    prediction: Prediction | None = None
    step: float | None = None
    why: str = ""

    @property
    def title(self) -> str:
        """The changes as they are typed."""
        typed = (f"{key.replace('schedule.name', 'schedule')}={value}" for key, value in self.changes.items())
        return " ".join(typed) or "as configured"

    @property
    def peak(self) -> float:
        """The most that any rank holds; infinity for a run that is refused."""
        ranks = self.prediction.ranks if self.prediction else []
        return max((each.peak for each in ranks), default=float("inf"))

    def fits(self, limit: float) -> bool:
        """Whether every rank stays within the limit."""
        ranks = self.prediction.ranks if self.prediction else []
        return bool(ranks) and not excess(ranks, [limit] * len(ranks))


class Switches:
    """The runs that differ from `config` in one switch or in several."""

    def __init__(self, config: TrainConfig, predictor: Predictor | None = None) -> None:
        self._config, self._predictor = config, predictor or Predictor()

    def row(self, changes: Changes | None = None) -> Row:
        """The run with these changes."""
        changes = changes or {}
        try:
            config = changed(self._config, changes)
            timetable = _timetable(config)
            prediction = self._predictor.predict(config, timetable)
            return Row(changes, prediction, simulate(timetable, _costs(config, timetable)).makespan)
        except (ConfigError, PlanError) as error:
            return Row(changes, why=str(error))

    def single(self) -> list[Row]:
        """Each switch by itself; the first row has none."""
        return [self.row(), *(self.row({key: value}) for key, values in self.choices() for value in values)]

    def choices(self) -> Iterator[tuple[str, list[Any]]]:
        """Per key the values that hold less or more than the configured one."""
        config = self._config
        if config.schedule.timetable is None:
            own = canonical_name(config.schedule.name)
            yield "schedule.name", [name for name in SCHEDULES if name != own]
        if config.memory.recompute == "none" and config.compile == "none":
            yield "memory.recompute", ["block"]
        if config.parallel.shard > 1 and config.parallel.reshard != "microbatch":
            yield "parallel.reshard", ["microbatch"]
        yield from _later_switches(config)

    def fitting(self, limit: float) -> tuple[list[Row], Row]:
        """(all combinations that fit, the shortest step first; the one that needs the least)."""
        options = [[{}, *({key: value} for value in values)] for key, values in self.choices()]
        rows = [self.row(_merged(chosen)) for chosen in product(*options)]
        fitting = [each for each in rows if each.fits(limit)]
        fitting.sort(key=lambda each: (each.step or 0.0, len(each.changes), each.peak))
        return fitting, min(rows, key=lambda each: each.peak)


def _later_switches(config: TrainConfig) -> Iterator[tuple[str, list[Any]]]:
    """Switches that only some versions of the config have."""
    later: tuple[tuple[str, Any], ...] = ()
    for name, value in later:
        if hasattr(config.memory, name):
            yield f"memory.{name}", [value]


def _merged(changes: Sequence[Changes]) -> Changes:
    return {key: value for each in changes for key, value in each.items()}


def changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    """The config with other values. Raises ConfigError for values that don't go together."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    made = {group: replace(getattr(config, group), **values) for group, values in groups.items()}
    if "schedule" in made:
        made["schedule"] = replace(made["schedule"], placement=None, stages_per_rank=None)
    return replace(config, **made)


def _timetable(config: TrainConfig) -> Timetable:
    num_ranks = pipeline_ranks(config.parallel, config.parallel.num_processes or 1)
    check_layers(build_model(config.model, config.seed, config.finetune), config.schedule, num_ranks)
    return build_timetable(config.schedule, num_ranks, config.num_microbatches)


def _costs(config: TrainConfig, timetable: Timetable) -> Costs:
    given = config.schedule.costs
    whole = RankCosts() if given is None else read_costs(given)[0]
    costs = whole.per_stage(timetable.num_stages, timetable.num_ranks)
    if config.memory.recompute == "none":
        return costs
    return with_recompute(costs, range(timetable.num_stages), timetable.num_stages)


# ---------------------------------------------------------------- as text


def memory_text(config: TrainConfig) -> Iterator[str]:
    """What `zbpp memory` prints, part by part. Raises ConfigError at the end if nothing fits the limit."""
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
            yield _what_fits(switches, limit)


def _what_fits(switches: Switches, limit: float) -> str:
    fitting, least = switches.fitting(limit)
    if not fitting:
        raise ConfigError(
            f"memory.limit={limit / 2**30:g}: nothing fits; the least that does: "
            f"memory.limit={math.ceil(least.peak / 2**30 * 1000) / 1000:g} with {least.title}"
        )
    first = ["these switches make it fit, the shortest step first:"]
    return "\n".join(first + [f"  {each.title}   ({in_bytes(each.peak)})" for each in fitting[:_MOST_SHOWN]])


def _cells(row: Row, own: Row) -> dict[str, str]:
    if row.prediction is None or row.step is None or own.step is None:
        return {"switch": row.title, "peak": "", "saves": "", "time": "", "note": row.why}
    saved = own.peak - row.peak
    share = f"{'-' if saved < 0 else ''}{in_bytes(abs(saved))}" if row is not own else ""
    time = f"x {row.step / own.step:.2f}"
    return {"switch": row.title, "peak": in_bytes(row.peak), "saves": share, "time": time, "note": ""}
