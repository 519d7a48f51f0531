"""What does not go with a pipeline, and what to write instead: one line for each, before anything is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zbpp.error_text import kind_of
from zbpp.job.joining import rank_and_size
from zbpp.models.hf import HuggingFace
from zbpp.models.hf.config import asks_for_balance
from zbpp.models.hf.shrink import build_on_meta
from zbpp.schedule import Timetable
from zbpp.transformers.cut_model import base_of

_TRAINERS = {"_BaseTrainer", "SFTTrainer", "DPOTrainer"}  # of TRL
_REPLACED = {"training_step", "prediction_step", "_wrap_model"}

_ARGUMENTS = {
    "deepspeed": "the pipeline spreads the model over the ranks: leave deepspeed out",
    "fsdp": "the pipeline spreads the model over the ranks: leave fsdp out",
    "torch_compile": "it compiles the whole model, which no rank runs: leave it out, or use zbpp train with "
    "compile=stage",
    "auto_find_batch_size": "all ranks would have to run out of memory together: write a batch size",
    "use_liger_kernel": "it replaces the loss that the last stage computes: leave it out",
    "parallelism_config": "the pipeline is the only parallelism here: leave it out",
    "activation_offloading": "write in_pipeline(..., extras=[zbpp.ActivationOffload(...)])",
    "fp16_full_eval": "write bf16=True, and no full_eval",
    "bf16_full_eval": "write bf16=True, and no full_eval",
    "debug": "its hooks are on the whole model, which no rank runs: leave it out",
    "save_on_each_node": "rank 0 alone has what is saved: write to a folder that all nodes see",
    "sync_ref_model": "no stage has a second model: leave it out",
    "use_weighting": "the last stage does not compute its weights: leave it out",
    "predict_with_generate": "a pipeline does not generate: load the saved model in one process",
    "enable_jit_checkpoint": "a signal comes to one rank, and all save together: leave it out",
    "torch_empty_cache_steps": "a step has no moment without activations: leave it out",
    "label_names": "the last stage takes labels: leave it out",
}
_WITH_REPLICAS = {  # {key: (its value, what to write)}
    "average_tokens_across_devices": (True, "all pipelines divide by the targets of all: write True"),
    "eval_use_gather_object": (False, "tensors alone go between pipelines: leave it out"),
}
_OPTIMIZERS = ("lomo", "layerwise")
_CHOSEN = {"mesh", "group", "device", "loss_fn", "num_microbatches", "timetable"}
_OFF_DEVICE = ("cpu", "meta")


def check_trainer(trainer: type[Any]) -> None:
    """Raise ValueError for a Trainer class that runs its model in other ways than once per batch."""
    of_trl = {each.__name__ for each in trainer.__mro__ if each.__module__.startswith("trl.")}
    if others := of_trl - _TRAINERS:
        raise ValueError(
            f"{min(others)} can't train in a pipeline: it generates, or runs the model on other batches "
            "than a step's, or a second model; SFTTrainer and DPOTrainer can"
        )
    for each in trainer.__mro__:
        own = _REPLACED & vars(each).keys()
        if own and each.__module__.partition(".")[0] not in ("transformers", "trl"):
            raise ValueError(
                f"{each.__name__} has a {min(own)} of its own, which a pipeline does not call: write "
                "compute_loss, which runs on the last stage"
            )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of Pipeline that a Trainer in a pipeline chooses itself."""
    if taken := _CHOSEN & options.keys():
        raise ValueError(
            f"in_pipeline makes one pipeline over all processes, and chooses {min(taken)} itself: leave it "
            "out"
        )


def check_layers(layers: object, schedule: object) -> None:
    """Raise ValueError for a layers_per_stage that is no list, and for a choice that can't be made."""
    if isinstance(layers, str) and layers != "auto":
        raise ValueError(
            f'layers_per_stage={layers!r}: write "auto", or how many layers each stage has, as [3, 5]'
        )
    if layers == "auto" and not isinstance(schedule, str):
        raise ValueError(
            "layers_per_stage='auto' chooses a cut for a schedule that has a name: write its name, or how "
            "many layers each stage has"
        )


def check_replicas(count: Any) -> None:
    """Raise ValueError unless the processes of the job can be so many pipelines."""
    _, world = rank_and_size()
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or world % count:
        raise ValueError(
            f"replicas={count!r} does not divide the number of processes, {world}: start others, or write a "
            "number that does"
        )


def check_slices(timetable: Timetable, own_loss: object) -> None:
    """Raise ValueError for slices of sequences with a loss that shifts the labels of whole ones."""
    if timetable.num_slices > 1 and own_loss is not None:
        raise ValueError(
            "the schedule cuts sequences into slices, and compute_loss (of SFTTrainer, label smoothing or "
            "your own) takes whole ones: write a schedule without slices"
        )


def check_arguments(args: Any, num_replicas: int = 1) -> None:
    """Raise ValueError for TrainingArguments that a pipeline can't do as the Trainer does."""
    for name, (value, advice) in _WITH_REPLICAS.items() if num_replicas > 1 else ():
        if getattr(args, name, value) != value:
            raise ValueError(f"{name} does not go with replicas={num_replicas}: {advice}")
    for name, advice in _ARGUMENTS.items():
        if getattr(args, name, None):
            raise ValueError(f"{name} does not go with in_pipeline: {advice}")
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate's {name} does not go with in_pipeline: start the script with torchrun"
            )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy=batch_rebalance deals batches out to data-parallel ranks; a pipeline "
            "is one: write group_by_length"
        )
    if not getattr(args, "precompute_ref_log_probs", True):
        raise ValueError(
            "DPO's reference model would run on each rank, whole, in each step: write "
            "precompute_ref_log_probs=True, and its figures are columns of the data"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _OPTIMIZERS):
        raise ValueError(
            f"optim={optimizer} updates inside backward, before the norm is known: write adamw_torch, or "
            "another one that updates in step()"
        )
    _, world = rank_and_size()
    if world > 1 and not dist.is_initialized():  # accelerate would let each process train alone
        raise ValueError(f"{world} processes were started, and no GPU is here: write use_cpu=True")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process has {args.n_gpu} GPUs: start one for each by torchrun --nproc-per-node {args.n_gpu}"
        )


def check_model(model: Any, model_init: Any = None) -> None:
    """Raise ValueError for a model, as the user gives it, that can't be cut or should not be here whole."""
    from transformers import PreTrainedModel

    if model_init is not None:
        raise ValueError("model_init makes models anew, which a pipeline has no way to: give model")
    base = base_of(model)
    if hasattr(model, "module") and not isinstance(base, PreTrainedModel):
        raise ValueError(f"the model is in a {type(model).__name__}: give the model itself")
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"in_pipeline takes a model of transformers, a PeftModel or a folder, not {kind_of(model)}"
        )
    if getattr(base, "is_quantized", False):
        method = getattr(base.quantization_method, "value", base.quantization_method)
        if method != "bitsandbytes":
            raise ValueError(
                f"the model is quantized by {method}, whose layers can't be left out of a rank: write "
                "quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
            )
    if device := next(
        (each.device for each in model.parameters() if each.device.type not in _OFF_DEVICE), None
    ):
        raise ValueError(
            f"the model is on {device} already, whole: leave device_map and .to() out, since each rank moves "
            "its own stages"
        )
    _check_config(base)


def _check_config(base: Any) -> None:
    config = base.config
    kind = type(build_on_meta(HuggingFace(config=config.to_dict()).library_config()))
    if type(base) is not kind:
        raise ValueError(
            f"a pipeline trains causal language models: {kind.__name__}, not {type(base).__name__}"
        )
    _check_values(config)


def _check_values(config: Any) -> None:
    if asks_for_balance(config):
        raise ValueError(
            "output_router_logits asks for a loss of all routers together, which no stage has: set "
            "model.config.output_router_logits = False, and router_aux_loss_coef=0.0 in the arguments of TRL"
        )
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise ValueError(
                f"config.{name} asks for values of all layers, which no stage has: set it to False"
            )


def check_folder(args: Any, layers: object) -> None:
    """Raise ValueError if the whole model is needed, and a rank would read its own tensors of a folder."""
    if args is None and layers == "auto":
        raise ValueError("layers_per_stage='auto' asks args for the sizes of a batch: give TrainingArguments")
    if getattr(args, "precompute_ref_log_probs", False):
        raise ValueError(
            "precompute_ref_log_probs runs the whole model first: instead of the folder give "
            "AutoModelForCausalLM.from_pretrained(...)"
        )


def check_precision(precision: str) -> None:
    """Raise ValueError for one that accelerate was told of by its launcher, and the arguments were not."""
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(
            f"accelerate's mixed precision {precision} does not go with in_pipeline: start the script with "
            "torchrun, and write bf16=True or fp16=True"
        )


def check_made_model(model: Any) -> None:
    """Raise ValueError for what the model has become in the Trainer's constructor, or was made before."""
    base = base_of(model)
    _check_values(base.config)
    own = vars(base).get("forward")
    if own is not None and own.__func__.__code__.co_name != "_fused_forward":  # TRL's: see StandIn
        raise ValueError("somebody has replaced the model's forward, which a pipeline would not call")
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"{config.peft_type.value} puts tokens before a batch in peft's forward, which no pipeline "
                "calls: write LoraConfig"
            )
