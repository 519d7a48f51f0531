"""The config of fine-tuning: which parameters are trained, and LoRA."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from zbpp.ranges import Checked, ConfigError, ranged


@dataclass(kw_only=True)
class LoraConfig(Checked):
    """Options of peft's LoraConfig, by peft's names. r: null: no LoRA."""

    prefix: ClassVar[str] = "finetune.lora."
    r: int | None = ranged(None, least=1)
    lora_alpha: float = ranged(8, above=0)
    lora_dropout: float = ranged(0.0, below=1)
    target_modules: Any = None  # names of modules, or a regular expression for whole names
    exclude_modules: Any = None
    layers_to_transform: list[int] | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    init_lora_weights: Any = True
    task_type: str | None = None  # for the adapter's config: CAUSAL_LM, ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is None:
            return
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("finetune.lora, but the package is not installed: pip install 'zbpp[peft]'")
        if not self.target_modules:
            raise ConfigError(
                "finetune.lora.target_modules is not set: write the names of the modules that get adapters, "
                "such as [q_proj,v_proj]"
            )

    @property
    def options(self) -> dict[str, Any] | None:
        """The arguments of peft's LoraConfig; None: no LoRA."""
        if self.r is None:
            return None
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


@dataclass(kw_only=True)
class FinetuneConfig(Checked):
    """Which parameters are trained, by patterns of their names in the whole model; or LoRA.

    freeze: parameters that match are not trained. train: only parameters that match are trained.
    """

    prefix: ClassVar[str] = "finetune."
    freeze: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.r is not None and (self.freeze or self.train):
            raise ConfigError(
                "finetune.lora trains its adapters alone, and freezes all else: leave finetune.freeze and "
                "finetune.train out"
            )
