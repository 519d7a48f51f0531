"""LoRA on the stages of a pipeline, by peft's own layers; adapters are written in peft's own format.

peft is applied to each stage by itself. A stage's modules have the names that they have in the whole model,
so the stages together get the adapters that the whole model would get. The initial values are peft's. They
are drawn from the seed and the layer's name alone, so they do not depend on the cut. Needs zbpp[peft].
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.error_text import did_you_mean
from zbpp.job.agreement import gather
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import whole_of
from zbpp.seeding import seed_of
from zbpp.training.optim.master_weights import MasterWeights

ADAPTER = "default"  # peft's name of a first adapter
_INITIAL = (True, False, "gaussian")
_BIASES = ("none", "all", "lora_only")
_COPY = f".modules_to_save.{ADAPTER}."
_PATTERNS = ("rank_pattern", "alpha_pattern")


def inject(stage: nn.Module, options: Mapping[str, Any], seed: int) -> None:
    """Put LoRA layers, and copies of modules to save, into a stage, in place; all else is frozen.

    options: the arguments of peft's LoraConfig. A stage without a target is frozen as a whole, but for biases
    that `bias` names. Raises ValueError for options that peft refuses.
    """
    peft, layers = importlib.import_module("peft"), importlib.import_module("peft.tuners.lora.layer")
    stage.requires_grad_(False)
    config = _config_of_stage(stage, lora_config(options))
    with torch.random.fork_rng([]):
        try:
            peft.inject_adapter_in_model(config, stage, adapter_name=ADAPTER)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"lora: {error}") from error
        for name, module in stage.named_modules():
            if isinstance(module, layers.LoraLayer):
                torch.default_generator.manual_seed(seed_of(seed, "lora", name))
                _draw(module, config)
    # A Hugging Face stage has its modules in its own tree and in the library's model, which it runs.
    adopt = getattr(stage, "adopt_modules", None)
    if adopt is not None:
        adopt()


def _draw(layer: Any, config: Any) -> None:
    """Draw the initial values of a LoRA layer as peft does."""
    layer.reset_lora_parameters(ADAPTER, config.init_lora_weights)
    if config.init_lora_weights is False:  # those of the constructors, which peft leaves as they are
        for linear in (*layer.lora_A.values(), *layer.lora_B.values()):
            linear.reset_parameters()
        for table in (*layer.lora_embedding_A.values(), *layer.lora_embedding_B.values()):
            nn.init.normal_(table)
        if config.use_dora:  # magnitudes of the new products
            layer.lora_variant[ADAPTER].init(layer, adapter_name=ADAPTER, config=config)


def _config_of_stage(stage: nn.Module, config: Any) -> Any:
    """peft's config with the names of this stage's modules, as peft would find them in the whole model."""
    tuners = importlib.import_module("peft.tuners.tuners_utils")
    no_target = importlib.import_module("peft.utils.constants").DUMMY_TARGET_MODULES
    _resolve_by_library(config, getattr(stage, "library_model", stage))
    # A stage may have modules of other stages without their parameters: these get no adapter.
    own = [name for name, module in stage.named_modules() if name and any(True for _ in module.parameters())]
    targets = [name for name in own if tuners.check_target_module_exists(config, name)]
    config.modules_to_save = _saved_modules(stage, own, config.modules_to_save or ())
    config.target_modules = set(targets) or no_target
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    for pattern in _PATTERNS:  # peft warns of keys that match nothing; those of other stages don't
        of_all = getattr(config, pattern) or {}
        setattr(config, pattern, {key: each for key, each in of_all.items() if _matches_one(key, targets)})
    return config


def _resolve_by_library(config: Any, model: nn.Module) -> None:
    """Let peft write names for all-linear, and of experts; both take a look at the library's whole model."""
    tuners = importlib.import_module("peft.tuners.tuners_utils")
    conversion = importlib.import_module("peft.utils.transformers_weight_conversion")
    given = config.target_modules
    conversion.convert_peft_config_for_transformers(config, model, None)
    if config.target_parameters:
        raise ValueError(
            f"lora.target_modules={given} hits experts, which get adapters of another kind from peft "
            f"({', '.join(sorted(config.target_parameters))}), and a pipeline can't train these: write the "
            "names of other modules, such as [q_proj,v_proj]"
        )
    tuners._maybe_include_all_linear_layers(config, model)


def _saved_modules(stage: nn.Module, own: Iterable[str], names: Iterable[str]) -> list[str] | None:
    """Those of a stage's modules that modules_to_save names. Raises ValueError for quantized ones."""
    found = [name for name in own if any(map(name.endswith, names))]
    for name in found:
        if any(not each.is_floating_point() for each in stage.get_submodule(name).parameters()):
            raise ValueError(
                f"lora.modules_to_save hits {name}, whose weights are quantized and can't be trained: leave "
                "it out, or add it to quantize_options.llm_int8_skip_modules"
            )
    return found or None


# What a pipeline trains, saves and loads as peft does; tests/training/test_lora.py tries each option.
_SUPPORTED = (
    "r",
    "target_modules",
    "lora_alpha",
    "lora_dropout",
    "lora_bias",
    "use_rslora",
    "use_dora",
    "bias",
    "modules_to_save",
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
    if options.get("bias", "none") not in _BIASES:
        raise ValueError(f"lora.bias={options['bias']}: write one of {', '.join(_BIASES)}")
    if options.get("init_lora_weights", True) not in _INITIAL:
        raise ValueError(
            f"lora.init_lora_weights={options['init_lora_weights']} computes values from the base weights: "
            "write true, false or gaussian"
        )
    return made(**options)


def check_quantized(options: Mapping[str, Any], model: Any) -> None:
    """Raise ValueError for an option that peft has not for a quantized base."""
    quantization: Any = getattr(model, "quantization", None)
    if options.get("use_dora") and getattr(quantization, "kind", None) == "int8":
        raise ValueError(
            f"lora.use_dora=true doesn't go with {quantization.name}: peft's layer loses the statistics of "
            "its weight in the first forward; write nf4 or fp4"
        )


def _refuse_unsupported(options: Mapping[str, Any], defaults: Any) -> None:
    for name, value in options.items():
        if name not in _SUPPORTED and value != getattr(defaults, name, value):
            raise ValueError(
                f"lora.{name}={value}: a pipeline can't train, save and load this as peft does; leave "
                f"it out. It has {', '.join(_SUPPORTED)}"
            )


def check_no_tied_target(options: Mapping[str, Any], tied: Mapping[str, str]) -> None:
    """Raise ValueError for a target, or a module to save, with a tied parameter. tied: {name: another}."""
    exists = importlib.import_module("peft.tuners.tuners_utils").check_target_module_exists
    config = lora_config(options)
    saved = tuple(config.modules_to_save or ())
    for pair in tied.items():
        for name in pair:
            module = name.rpartition(".")[0]
            is_saved = any(each.endswith(saved) for each in accumulate(module.split("."), "{}.{}".format))
            if is_saved or exists(config, module):
                option = "modules_to_save" if is_saved else "target_modules"
                raise ValueError(
                    f"finetune.lora.{option} hits {module}, which has a tied parameter "
                    f"({' and '.join(pair)} are one tensor): leave this module out of {option}"
                )


def check_targets(pipeline: Pipeline, options: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks for a name or a pattern that matches no module. Collective."""
    own = [name for name, _ in pipeline.named_parameters()]
    adapted = _everywhere(pipeline, (name.partition(".lora_")[0] for name in own if ".lora_" in name))
    targets, saved = options["target_modules"], options.get("modules_to_save") or []
    if isinstance(targets, str):
        missing = [] if adapted else [targets]
    else:
        missing = [each for each in targets if not any(_is_target(name, each) for name in adapted)]
    _refuse_missing(pipeline, options, "target_modules", missing)
    copied = _everywhere(pipeline, (name.partition(_COPY)[0] for name in own if _COPY in name))
    missing = [each for each in saved if not any(name.endswith(each) for name in copied)]
    _refuse_missing(pipeline, options, "modules_to_save", missing)
    for pattern in _PATTERNS:
        for key in options.get(pattern) or ():
            if not _matches_one(key, adapted):
                raise ValueError(f"lora.{pattern}: {key} matches none of {', '.join(sorted(adapted))}")


def _everywhere(pipeline: Pipeline, own: Iterable[str]) -> set[str]:
    return set().union(*pipeline.place.gather(set(own)))


def _refuse_missing(
    pipeline: Pipeline, options: Mapping[str, Any], option: str, missing: Sequence[str]
) -> None:
    if not missing:
        return
    modules = _everywhere(pipeline, (_unwrapped(name) for name, _ in pipeline.named_parameters()))
    names = sorted({each.split(".")[-1] for each in modules})
    name = missing[0]
    hint = did_you_mean(name, names)
    if name in names:  # a module has this name, and is no target nevertheless
        hint = "; exclude_modules, layers_to_transform or modules_to_save leave it out"
        if options[option] == name:
            hint = f"; text is a pattern of whole names: write a list, [{name}]"
    raise ValueError(
        f"lora.{option}: {', '.join(missing)} matches no module of the model; its modules with "
        f"weights are {', '.join(names)}{hint}"
    )


def _unwrapped(name: str) -> str:
    """The module that the model had, before peft wrapped it, for the parameter of this name."""
    for mark in (".lora_", _COPY, ".original_module."):
        if mark in name:
            return name.partition(mark)[0]
    return name.rpartition(".")[0].removesuffix(".base_layer")


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
    own = {name: each for stage in pipeline.stages.values() for name, each in _adapter(stage, masters)}
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
    if str(config.target_modules).lower() == "all-linear":  # peft, too, writes what it has found
        found = {name.partition(".lora_")[0] for name in adapters if ".lora_" in name}
        config.target_modules = {name.removeprefix(_PREFIX) for name in found}
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    unfinished = folder / "adapter_model.tmp"
    save_file(dict(adapters), unfinished, {"format": "pt"})
    unfinished.replace(folder / "adapter_model.safetensors")


_PREFIX = "base_model.model."  # of the names that peft writes


def peft_names(stage: nn.Module) -> dict[str, str]:
    """{name in peft's files: in the stage} of what peft saves of it; a stage may be on the meta device."""
    state = stage.state_dict(keep_vars=True)
    names = {id(each): name for name, each in state.items()}
    saved = importlib.import_module("peft").get_peft_model_state_dict(
        stage, state, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {f"{_PREFIX}{name}": names[id(each)] for name, each in saved.items()}


def _adapter(stage: nn.Module, masters: MasterWeights | None) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, values on the CPU) of what peft saves of a stage; a master's values if there is one."""
    state = stage.state_dict(keep_vars=True)
    for of_peft, name in peft_names(stage).items():
        value = state[name]
        if masters is not None and isinstance(value, nn.Parameter):
            value = masters.of(value)
        yield of_peft, whole_of(value.detach()).to("cpu", copy=True).contiguous()
