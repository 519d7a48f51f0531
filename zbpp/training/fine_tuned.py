"""A model of which only a part is trained: parameters frozen by name, or LoRA adapters."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.error_text import did_you_mean
from zbpp.job.agreement import gather
from zbpp.runtime import Pipeline
from zbpp.runtime.dtensors import whole_of
from zbpp.seeding import seed_of
from zbpp.stage_api import check_pipeline
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.parameter_groups import check_all_match

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FineTuned:
    """A model of which only a part is trained; see zbpp/stage_api.py for what a model is.

    freeze, train: patterns of parameters' names, see frozen.py. lora: the arguments of peft's LoraConfig;
    None: no LoRA. seed: of the adapters' initial values. Raises ValueError as lora_config does.
    """

    def __init__(
        self,
        model: Any,
        *,
        freeze: Sequence[str] = (),
        train: Sequence[str] = (),
        lora: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if lora is not None:
            lora_config(lora)  # raises ValueError for options that a pipeline can't have
        self.model, self._freeze, self._train = model, freeze, train
        self._lora, self._seed = lora, seed

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """The model's stage, with frozen parameters or with adapters."""
        if self._lora is not None:
            check_no_tied_target(self._lora, self._tied())  # the same on all ranks
        stage: nn.Module = self.model.build_stage(index, num_stages)
        if self._lora is not None:
            inject(stage, self._lora, self._seed)
        elif self._freeze or self._train:
            freeze(stage, self._freeze, self._train, self._tied())
        return stage

    def check_pipeline(self, pipeline: Pipeline) -> None:
        """Raise ValueError on all ranks for a pattern or target that matches nothing on any. Collective."""
        check_pipeline(self.model, pipeline)
        check_frozen(pipeline, self._freeze, self._train)
        if self._lora is not None:
            check_targets(pipeline, self._lora)

    def _tied(self) -> Mapping[str, str]:
        tied: Mapping[str, str] = self.model.tied() if hasattr(self.model, "tied") else {}
        return tied

    @property
    def loss(self) -> Any:
        """The model's loss."""
        return self.model.loss

    def __getattr__(self, name: str) -> Any:
        """The model's other attributes: tied, parallelize, metrics, ..."""
        if name == "model":  # not set yet, while copy or pickle makes this object
            raise AttributeError(name)
        if name == "parallelize" and self._lora is not None:
            return _refuse_to_split
        return getattr(self.model, name)


def _refuse_to_split(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The `parallelize` of a model with adapters. Raises ValueError."""
    raise ValueError(
        f"LoRA doesn't go with a mesh of tensor={mesh.size()}: the model's plan splits the modules that LoRA "
        "wraps; write tensor=1, with more pipeline ranks or shards"
    )


# ----------------------------------------------------------------
# Freezing parameters of a model by patterns of their names in the whole model.
#
#     freeze   parameters that match are not trained
#     train    only parameters that match are trained
#
# A frozen parameter has no gradient, no optimizer state, no W, and F keeps no input for it.


def freeze(
    stage: nn.Module, freeze: Sequence[str], train: Sequence[str], tied: Mapping[str, str] | None = None
) -> None:
    """Freeze parameters of a stage. tied: the model's `tied()`; a tied parameter matches by all its names."""
    aliases = _aliases(tied or {})
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).update(aliases.get(name, {name}))
    for parameter, own in names.items():
        if _match(own, freeze) or (train and not _match(own, train)):
            parameter.requires_grad_(False)


def check_frozen(pipeline: Pipeline, freeze: Sequence[str], train: Sequence[str]) -> None:
    """Raise ValueError on all ranks for a pattern without match, and if nothing is trained. Collective."""
    check_all_match(pipeline, freeze, "freeze")
    check_all_match(pipeline, train, "train")
    if (freeze or train) and not any(
        pipeline.place.gather(any(each.requires_grad for each in pipeline.parameters()))
    ):
        raise ValueError("freeze and train leave no parameter to train: write fewer patterns in freeze")


def _match(names: Collection[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _aliases(tied: Mapping[str, str]) -> dict[str, set[str]]:
    """{name of a tied parameter: all names of that parameter}."""
    groups: dict[str, set[str]] = {}
    for name, other in tied.items():
        joined = {name, other} | groups.get(name, set()) | groups.get(other, set())
        groups |= dict.fromkeys(joined, joined)
    return groups


# ----------------------------------------------------------------
# LoRA on the stages of a pipeline, by peft's own layers; adapters are written in peft's own format.
#
# peft is applied to each stage by itself. A stage's modules have the names that they have in the whole model,
# so the stages together get the adapters that the whole model would get. The initial values are peft's. They
# are drawn from the seed and the layer's name alone, so they do not depend on the cut. Needs zbpp[peft].

ADAPTER = "default"  # peft's name of a first adapter
_INITIAL = (True, False, "gaussian")
_PATTERNS = ("rank_pattern", "alpha_pattern")


def inject(stage: nn.Module, options: Mapping[str, Any], seed: int) -> None:
    """Put LoRA layers into a stage, in place; all its other parameters are frozen.

    options: the arguments of peft's LoraConfig. A stage without a target is frozen as a whole. Raises
    ValueError for options that peft refuses.
    """
    config = lora_config(options)
    peft = importlib.import_module("peft")
    layers = importlib.import_module("peft.tuners.lora.layer")
    exists = importlib.import_module("peft.tuners.tuners_utils").check_target_module_exists
    stage.requires_grad_(False)
    # A stage may have modules of other stages without their parameters: these get no adapter.
    targets = [
        name
        for name, module in stage.named_modules()
        if name and exists(config, name) and any(True for _ in module.parameters())
    ]
    if not targets:
        return
    config.target_modules, config.exclude_modules, config.layers_to_transform = set(targets), None, None
    for pattern in _PATTERNS:  # peft warns of keys that match nothing; those of other stages don't
        of_all = getattr(config, pattern) or {}
        setattr(config, pattern, {key: each for key, each in of_all.items() if _matches_one(key, targets)})
    with torch.random.fork_rng([]):
        try:
            peft.inject_adapter_in_model(config, stage, adapter_name=ADAPTER)
        except (ValueError, TypeError) as error:
            raise ValueError(f"lora: {error}") from error
        for name, module in stage.named_modules():
            if isinstance(module, layers.LoraLayer):
                torch.default_generator.manual_seed(seed_of(seed, "lora", name))
                module.reset_lora_parameters(ADAPTER, config.init_lora_weights)
    # A Hugging Face stage has its modules in its own tree and in the library's model, which it runs.
    adopt = getattr(stage, "adopt_modules", None)
    if adopt is not None:
        adopt()


# What a pipeline trains, saves and loads as peft does; tests/training/test_lora_options.py tries each option.
_SUPPORTED = (
    "r",
    "target_modules",
    "lora_alpha",
    "lora_dropout",
    "lora_bias",
    "use_rslora",
    "init_lora_weights",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "task_type",
    "revision",
)


def lora_config(options: Mapping[str, Any]) -> Any:
    """peft's LoraConfig. Raises ValueError for options that a pipeline can't have."""
    made = importlib.import_module("peft").LoraConfig
    _refuse_unsupported(options, made())
    targets = options.get("target_modules")
    if not targets:
        raise ValueError(
            "lora.target_modules is not set: write the names of the modules that get adapters, such as "
            "[q_proj,v_proj]"
        )
    if isinstance(targets, str) and targets.lower() == "all-linear":
        raise ValueError(
            "lora.target_modules=all-linear asks for the whole model's output layer, which a stage does not "
            "know: write the names, such as [q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
        )
    if options.get("init_lora_weights", True) not in _INITIAL:
        raise ValueError(
            f"lora.init_lora_weights={options['init_lora_weights']} computes values from the base weights: "
            "write true, false or gaussian"
        )
    return made(**options)


def _refuse_unsupported(options: Mapping[str, Any], defaults: Any) -> None:
    for name, value in options.items():
        if name not in _SUPPORTED and value != getattr(defaults, name, value):
            raise ValueError(
                f"lora.{name}={value}: a pipeline can't train, save and load this as peft does; leave "
                f"it out. It has {', '.join(_SUPPORTED)}"
            )


def check_no_tied_target(options: Mapping[str, Any], tied: Mapping[str, str]) -> None:
    """Raise ValueError for a target module with a tied parameter. tied: {name: the name it is tied to}."""
    exists = importlib.import_module("peft.tuners.tuners_utils").check_target_module_exists
    config = lora_config(options)
    for pair in tied.items():
        hit = next((name for name in pair if exists(config, name.rpartition(".")[0])), None)
        if hit is not None:
            raise ValueError(
                f"finetune.lora.target_modules hits {hit.rpartition('.')[0]}, which has a tied parameter "
                f"({' and '.join(pair)} are one tensor): leave this module out of target_modules"
            )


def check_targets(pipeline: Pipeline, options: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks for a target or a pattern that matches no module. Collective."""
    own = {name.partition(".lora_")[0] for name, _ in pipeline.named_parameters() if ".lora_" in name}
    adapted = set().union(*pipeline.place.gather(own))
    targets = options["target_modules"]
    if isinstance(targets, str):
        missing = [] if adapted else [targets]
    else:
        missing = [each for each in targets if not any(_is_target(name, each) for name in adapted)]
    if missing:
        modules = {_unwrapped(name) for name, _ in pipeline.named_parameters()}
        names = sorted({each.split(".")[-1] for part in pipeline.place.gather(modules) for each in part})
        raise ValueError(
            f"lora.target_modules: {', '.join(missing)} matches no module of the model; its modules with "
            f"weights are {', '.join(names)}{did_you_mean(missing[0], names)}"
        )

    for pattern in _PATTERNS:
        for key in options.get(pattern) or ():
            if not _matches_one(key, adapted):
                raise ValueError(f"lora.{pattern}: {key} matches none of {', '.join(sorted(adapted))}")


def _unwrapped(name: str) -> str:
    """The module that the model had, before peft wrapped it, for the parameter of this name."""
    return (
        name.partition(".lora_")[0]
        if is_adapter(name)
        else name.rpartition(".")[0].removesuffix(".base_layer")
    )


def _matches_one(key: str, names: Iterable[str]) -> bool:
    """Whether a key of a pattern matches one of the modules, as peft sees it."""
    return any(re.match(rf"(.*\.)?({key})$", name) for name in names)


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def save_adapter(
    folder: Path,
    pipeline: Pipeline,
    options: Mapping[str, Any],
    *,
    masters: MasterWeights | None = None,
    base: str | None = None,
) -> None:
    """Write the adapters of all stages into `folder`, as peft's save_pretrained does. Collective.

    The files are adapter_config.json and adapter_model.safetensors; `PeftModel.from_pretrained(model,
    folder)` loads them. base: the name or folder of the base model, for the config. The first process writes,
    and gets the adapters of its pipeline's other ranks.
    """
    own = {peft_name(name): each for name, each in _adapters(pipeline, masters)}
    everywhere = gather(own, pipeline.group)
    if not pipeline.place.is_first or pipeline.rank != 0:
        return
    write_adapter(folder, {name: each for part in everywhere for name, each in part.items()}, options, base)


def write_adapter(
    folder: Path, adapters: Mapping[str, Tensor], options: Mapping[str, Any], base: str | None = None
) -> None:
    """Write the files of an adapter. adapters: its tensors by peft's names."""
    from safetensors.torch import save_file

    config = lora_config(options)
    config.inference_mode, config.base_model_name_or_path = True, base
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    unfinished = folder / "adapter_model.tmp"
    save_file(dict(adapters), unfinished, {"format": "pt"})
    unfinished.replace(folder / "adapter_model.safetensors")


def peft_name(name: str) -> str:
    """What peft calls a tensor that has this name in a stage."""
    return "base_model.model." + re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name)


def is_adapter(name: str) -> bool:
    """Whether the tensor with this name in a stage is a part of an adapter."""
    return ".lora_" in name


def _adapters(pipeline: Pipeline, masters: MasterWeights | None) -> Iterator[tuple[str, Tensor]]:
    """(name in its stage, values on the CPU) of each adapter here; its master's values if it has one."""
    for stage in pipeline.stages.values():
        for name, parameter in stage.named_parameters():
            if is_adapter(name):
                value = parameter if masters is None else masters.of(parameter)
                yield name, whole_of(value.detach()).to("cpu", copy=True).contiguous()
