"""model.layers_per_stage=auto: what it needs, and the cut that the run has had so far."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from zbpp.checkpoints.folders import checkpoints_in
from zbpp.config import ConfigError, TrainConfig, read_run_config, with_values
from zbpp.run.model import cut_that_may_change
from zbpp.run.plan import check_plan
from zbpp.schedule import PlanError
from zbpp.training.run_folder import CHECKPOINTS

Changes = dict[str, Any]
"""Values of a config by dotted key."""

_KEY = "model.layers_per_stage"


def uncut(config: TrainConfig) -> TrainConfig:
    """The config with the model's own cut where the cut is still to be chosen."""
    found: TrainConfig = with_values(config, {_KEY: None}) if config.asks_for_cut else config
    return found


def speeds_of(config: TrainConfig, num_ranks: int) -> list[float]:
    """The speed of each rank of a pipeline. Raises ConfigError for a list that is no fit."""
    given: list[float] | None = config.parallel.speeds
    if given is not None and len(given) != num_ranks:
        raise ConfigError(
            f"parallel.speeds={given} has {len(given)} numbers for {num_ranks} ranks of a pipeline: "
            "write one for each"
        )
    return given or [1.0] * num_ranks


def check_cut(config: TrainConfig, num_ranks: int) -> None:
    """Raise ConfigError, before ranks start, for what a cut can't be chosen for."""
    config.memory.limits(num_ranks)
    if not config.asks_for_cut:
        return
    speeds_of(config, num_ranks)
    if cut_that_may_change(uncut(config), num_ranks) is None:
        raise ConfigError(
            f"model.layers_per_stage=auto: {config.model['_target_']} has no cut to choose: "
            "give the class an argument layers_per_stage and a method layer_counts(num_stages)"
        )


def earlier_cut(config: TrainConfig) -> Changes:
    """What an earlier start of this run has chosen, which goes on now; {} if there is none.

    The speeds for which it was chosen belong to it, unless the config gives others. A schedule does if it was
    chosen, too (schedule=auto); a named one may change.
    """
    folder = Path(config.run_dir)
    if config.overwrite or config.resume == "none" or not checkpoints_in(folder / CHECKPOINTS):
        return {}
    with suppress(ConfigError, KeyError):
        saved = read_run_config(folder / "config.yaml")
        if (counts := saved["model"]["layers_per_stage"]) is None:
            return {}
        names = () if config.schedule.replan is None else ("name", "placement", "stages_per_rank")
        speeds = {"parallel.speeds": config.parallel.speeds or saved["parallel"].get("speeds")}
        return {_KEY: counts, **speeds, **{f"schedule.{name}": saved["schedule"][name] for name in names}}
    return {}


def fits(cut: Changes, config: TrainConfig, num_ranks: int) -> bool:
    """Whether a run can have this cut."""
    with suppress(ConfigError, PlanError):
        run = with_values(config, cut)
        check_plan(run, num_ranks)
        speeds_of(run, num_ranks)
        return True
    return False
