"""LoRA on the stages of a pipeline, by peft's own layers; adapters are written in peft's own format.

peft is applied to each stage by itself. A stage's modules have the names that they have in the whole model,
so the stages together get the adapters that the whole model would get. The initial values are peft's. They
are drawn from the seed and the layer's name alone, so they do not depend on the cut. Needs the extra `peft`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.job.agreement import gather
from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.mesh import whole_of
from zbpp.seeding import seed_of
from zbpp.training.optim.master_weights import MasterWeights

ADAPTER = "default"  # peft's name of a first adapter
_INITIAL = (True, False, "gaussian")


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
    with torch.random.fork_rng([]):
        try:
            peft.inject_adapter_in_model(config, stage, adapter_name=ADAPTER)
        except (ValueError, TypeError) as error:
            raise ValueError(f"lora: {error}") from error
        for name, module in stage.named_modules():
            if isinstance(module, layers.LoraLayer):
                torch.manual_seed(seed_of(seed, "lora", name))
                module.reset_lora_parameters(ADAPTER, config.init_lora_weights)
    # A Hugging Face stage has its modules in its own tree and in the library's model, which it runs.
    adopt = getattr(stage, "adopt_modules", None)
    if adopt is not None:
        adopt()


def lora_config(options: Mapping[str, Any]) -> Any:
    """peft's LoraConfig. Raises ValueError for options that a pipeline can't have."""
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
            f"lora.init_lora_weights={options['init_lora_weights']} computes values from the base weights, "
            "which it changes: write true, false or gaussian"
        )
    return importlib.import_module("peft").LoraConfig(**options)


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
    """Raise ValueError on all ranks for an entry of target_modules that matches no module. Collective."""
    own = {name.partition(".lora_")[0] for name, _ in pipeline.named_parameters() if ".lora_" in name}
    adapted = set().union(*pipeline.place.gather(own))
    targets = options["target_modules"]
    if isinstance(targets, str):
        missing = [] if adapted else [targets]
    else:
        missing = [each for each in targets if not any(_is_target(name, each) for name in adapted)]
    if missing:
        modules = {name.rpartition(".")[0] for name, _ in pipeline.named_parameters()} - own
        names = sorted({each.split(".")[-1] for part in pipeline.place.gather(modules) for each in part})
        raise ValueError(
            f"lora.target_modules: {', '.join(missing)} matches no module of the model; modules with weights "
            f"are called {', '.join(names)}"
        )


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
