"""The config of the optimizer, its learning rates and clipping: configs/optimizer/."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from omegaconf import DictConfig

from zbpp.ranges import Checked, ConfigError, one_of, ranged


def _open_node() -> Any:
    """A node that takes any key from the command line, without a + before it."""
    return DictConfig({}, flags={"struct": False})


@dataclass(kw_only=True)
class OptimizerConfig(Checked):
    """An optimizer, whose learning rate rises linearly in the warm-up, then follows lr_schedule.

    stable_adamw and lion are torch-optimi's; lion takes no eps. muon is torch's, with AdamW for parameters
    that are no matrix of a hidden layer; momentum is Muon's. custom is the optimizer that build names.

    build: `_target_`, an optimizer's class, and its own arguments, in place of those of this config.
    per_parameter: of the optimizer that build names: whether it updates each parameter from this parameter's
        gradient alone, as torch.optim's and torch-optimi's do, of which that is known.
    groups: other options for parameters by name, see zbpp/training/optim/parameter_groups.py.
    lr_schedule: after the warm-up, down to min_ratio of the rate; wsd falls in the last decay_steps (null: a
        fifth of all steps).
    lr_scheduler: `_target_`, a class of torch.optim.lr_scheduler, and its arguments, in place of lr_schedule.
    """

    prefix: ClassVar[str] = "optimizer."
    name: str = one_of("adamw", "stable_adamw", "lion", "muon", "custom")
    build: Any = field(default_factory=_open_node)
    per_parameter: bool = False
    groups: list[dict[str, Any]] = field(default_factory=list)
    learning_rate: float = ranged(1e-3, above=0)
    beta1: float = ranged(0.9, below=1)
    beta2: float = ranged(0.95, below=1)
    eps: float = ranged(1e-8)
    weight_decay: float = ranged(0.1)
    momentum: float = ranged(0.95, below=1)
    lr_schedule: str = one_of("cosine", "linear", "constant", "wsd")
    lr_scheduler: Any = field(default_factory=_open_node)
    warmup_steps: int = ranged(10)
    decay_steps: int | None = ranged(None, least=1)
    min_ratio: float = ranged(0.1, most=1)
    # The largest norm that the gradients of all stages together may have; null: no clipping.
    clip_norm: float | None = ranged(1.0, above=0)
    kahan_sum: bool = False  # true: for precision=bfloat16, what rounding takes off an update is kept
    # after: ranks update before they know the norm, and take the update back if it had to be clipped.
    validation: str = one_of("before", "after")
    # With validation=after: it begins after so many steps in a row that were not clipped. 0: always.
    validation_after: int = ranged(10)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("build", "lr_scheduler"):
            _check_node(name, getattr(self, name))
        if self.kahan_sum:
            need_optimi("optimizer.kahan_sum=true")
        if self.name in ("stable_adamw", "lion"):
            need_optimi(f"optimizer.name={self.name}")
        self._check_custom()
        self._check_schedule()

    def _check_custom(self) -> None:
        target = (self.build or {}).get("_target_")
        if self.name != "custom":
            if self.build:
                raise ConfigError(f"optimizer.build is for optimizer=custom, but optimizer.name={self.name}")
            if self.momentum != 0.95 and self.name != "muon":
                raise ConfigError(f"optimizer.momentum={self.momentum} is Muon's: write optimizer=muon")
            return
        if not isinstance(target, str):
            raise ConfigError(
                "optimizer=custom needs a class: write optimizer.build._target_=torch.optim.SGD "
                "optimizer.build.lr=0.1"
            )
        if target.partition(".")[0] == "optimi":
            need_optimi(f"optimizer.build._target_={target}")
        theirs = {"learning_rate": "lr", "beta1": "betas", "beta2": "betas"}
        for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "momentum", "kahan_sum"):
            if getattr(self, name) != _default_of(OptimizerConfig, name):
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} is not passed on to {target}: write its own "
                    f"argument, as optimizer.build.{theirs.get(name, name)}=..."
                )

    def _check_schedule(self) -> None:
        if self.lr_scheduler and not isinstance(self.lr_scheduler.get("_target_"), str):
            raise ConfigError(
                "optimizer.lr_scheduler needs a class: write "
                "optimizer.lr_scheduler._target_=torch.optim.lr_scheduler.StepLR"
            )
        if self.lr_scheduler and self.lr_schedule != "cosine":
            raise ConfigError(
                f"optimizer.lr_schedule={self.lr_schedule} and optimizer.lr_scheduler are both given: leave "
                "one out"
            )
        if self.decay_steps is not None and self.lr_schedule != "wsd":
            raise ConfigError(
                f"optimizer.decay_steps={self.decay_steps} is for optimizer.lr_schedule=wsd, but "
                f"lr_schedule={self.lr_schedule}"
            )


def _check_node(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"optimizer.{name}={value}: write optimizer.{name}._target_=..., a class")


def _default_of(kind: Any, name: str) -> Any:
    return next(each.default for each in fields(kind) if each.name == name)


def need_optimi(setting: str) -> None:
    if importlib.util.find_spec("optimi") is None:
        raise ConfigError(f"{setting}, but the package is not installed: pip install 'zbpp[optimi]'")
