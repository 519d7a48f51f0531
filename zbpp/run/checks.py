"""Which switches of a config don't go together: what extras exclude (docs/pipeline.md), and a few more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zbpp.config import ConfigError, TrainConfig, check_node, without_batching
from zbpp.features.activation_offload.activation_offload import ActivationOffload
from zbpp.features.context.context import ContextParallel
from zbpp.features.experts.experts import ExpertParallel
from zbpp.features.experts.overlap_exchange import OverlapExchange
from zbpp.features.fewer_bytes.codes import CODED
from zbpp.features.fewer_bytes.fewer_bytes import FewerBytes
from zbpp.features.gradient_release.gradient_release import NOT_WITH_ACCUMULATION, GradientRelease
from zbpp.features.graphs import CudaGraphs
from zbpp.features.post_validation.validation import Validation
from zbpp.features.slices.sequence_slices import SequenceSlices
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.models.hf.config import quantized_as
from zbpp.planning import takes_costs
from zbpp.training.optim.precision import PRECISIONS


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError for what the config alone shows: excluded switches, unknown arguments of a class."""
    check_together(config)
    optimizer = config.optimizer
    nodes = [("model", config.model), ("data", without_batching(config.data))]
    nodes += [(f"callbacks[{number}]", node) for number, node in enumerate(config.callbacks)]
    nodes += [("optimizer.build", optimizer.build), ("optimizer.lr_scheduler", optimizer.lr_scheduler)]
    for part, node in nodes:
        if isinstance(node, Mapping) and node:
            check_node(part, node)


def check_together(config: TrainConfig) -> None:
    """Raise ConfigError for two switches that are on and don't go together."""
    on = _switches(config)
    for one, other, instead in (*_of_extras(), *_OF_SWITCHES):
        if one in on and other in on:
            raise ConfigError(f"{on[one]} doesn't go with {on[other]}: {instead}")


_EXTRAS = (
    ActivationOffload, ContextParallel, CudaGraphs, ExpertParallel, FewerBytes, GradientRelease,
    OffloadedWeights, OverlapExchange, SequenceSlices, Validation,
)  # fmt: skip
# (one switch, another one, what to write instead): those that are no matter of a pipeline's extras alone.
_OF_SWITCHES = (
    ("cuda_graphs", "recompute", "write memory.recompute=none"),
    ("gradient_release", "clip", "it needs the norm first; write null, and optimizer=stable_adamw, say"),
    ("gradient_release", "masters", "write precision=bfloat16 optimizer=optimi_adamw"),
    ("activation_offload", "no costs", "write schedule.costs=costs.json, the file of zbpp measure"),
    ("budget", "eager", "write compile=stage or layer, or memory.recompute=block to hold less"),
    ("compile", "shard", "write parallel.replicate"),
    ("compile", "context", "write compile=none"),
    ("compile", "recompute", "write a memory.budget below 1 to hold less"),
    ("whole stage", "shard", "write memory.recompute=block"),
    ("weight_offload", "compile", "write compile=none"),
    ("weight_offload", "mixed", "write precision=float32 or bfloat16"),
    ("lora", "tensor", "write parallel.tensor=1"),
    ("quantized", "no lora", "its weights are frozen; write finetune.lora, or take an unquantized base"),
    ("quantized", "shard", "write parallel.replicate, or more pipeline ranks"),
    ("quantized", "compile", "write compile=none"),
    ("quantized", "weight_offload", "write memory.offload_weights=false"),
    ("tokens", "replan", "name a schedule, and give the times that zbpp measure found as schedule.costs"),
    ("fewer_bytes", "other dtype", "it would change no message; write parallel.messages=exact"),
    ("cuda_graphs", "tokens", "graphs have fixed shapes; leave one of them out"),
    ("tokens", "activation_offload", "copies are planned for microbatches that are alike"),
    ("slices", "replan", "its steps would be measured by the microbatch; write schedule.costs=costs.json"),
    ("speeds", "even cut", "write model.layers_per_stage=auto, which chooses a cut for them"),
    ("chosen cut", "costs", "the file's times are of another cut; leave it out"),
    ("chosen cut", "recompute=auto", "write memory.recompute=none or block"),
    (
        "chosen cut",
        "searched plan",
        "write schedule=auto, which also chooses a schedule, or name a fixed one",
    ),
    ("slices", "tokens", "leave schedule.slices out; in a loop of your own slices cut zbpp.per_microbatch"),
)


def _of_extras() -> Iterator[tuple[str, str, str]]:
    for extra in _EXTRAS:
        yield from ((extra.name, other, instead) for other, instead in extra.excludes.items())
    yield from (("accumulate", other, instead) for other, instead in NOT_WITH_ACCUMULATION.items())


def _null(value: object) -> object:
    return "null" if value is None else value


def _quantized(model: Mapping[str, Any]) -> tuple[str, bool]:
    kind, path = model.get("quantize"), model.get("path")
    if kind is None and isinstance(path, str) and quantized_as(Path(path)) is not None:
        return f"model.path={path}, whose weights are quantized,", True
    return f"model.quantize={kind}", kind is not None


def _switches(config: TrainConfig) -> dict[str, str]:
    """The switches that are on, as one types them, by the names of extras and dimensions, or others."""
    memory, parallel, precision = config.memory, config.parallel, config.precision
    schedule, cut = config.schedule, _null(config.model.get("layers_per_stage"))
    release, validation, clip = (
        memory.gradient_release,
        config.optimizer.validation,
        config.optimizer.clip_norm,
    )
    recompute, compiled = f"memory.recompute={memory.recompute}", f"compile={config.compile}"
    is_mixed = PRECISIONS[precision].is_mixed
    typed = {
        "activation_offload": (f"memory.offload={memory.offload}", memory.offload != "none"),
        "cuda_graphs": ("cuda_graphs=true", config.cuda_graphs),
        "expert_parallel": (f"parallel.expert={parallel.expert}", parallel.expert > 1),
        "gradient_release": (f"memory.gradient_release={release}", release != "off"),
        "accumulate": (f"memory.gradient_release={release}", release == "accumulate"),
        "head_at_once": ("memory.head_at_once=true", memory.head_at_once),
        "weight_offload": ("memory.offload_weights=true", memory.offload_weights),
        "overlap_exchange": ("parallel.overlap_exchange=true", parallel.overlap_exchange),
        "post_validation": (f"optimizer.validation={validation}", validation == "after"),
        "replicate": (f"parallel.replicate={parallel.replicate}", parallel.replicate > 1),
        "shard": (f"parallel.shard={parallel.shard}", parallel.shard > 1),
        "context": (f"parallel.context={parallel.context}", parallel.context > 1),
        "context_parallel": (f"parallel.context={parallel.context}", parallel.context > 1),
        "tensor": (f"parallel.tensor={parallel.tensor}", parallel.tensor > 1),
        "fewer_bytes": (f"parallel.messages={parallel.messages}", parallel.messages != "exact"),
        "other dtype": (
            f"precision={precision}",
            PRECISIONS[precision].compute not in CODED.get(parallel.messages, ()),
        ),
        "dynamic_shapes": ("parallel.dynamic_shapes=true", parallel.dynamic_shapes),
        "tokens": ("data.batching=tokens", config.batching.is_tokens),
        "replan": (f"schedule.replan={config.schedule.replan}", config.schedule.replan is not None),
        "recompute": (recompute, memory.recompute != "none"),
        "whole stage": (recompute, memory.recompute == "stage"),
        "compile": (compiled, config.compile != "none"),
        "eager": (compiled, config.compile == "none"),
        "budget": (f"memory.budget={memory.budget}", memory.budget != 1),
        "mixed": (f"precision={precision}", is_mixed),
        "masters": (
            f"precision={precision}",
            precision == "mixed_float16" or (is_mixed and parallel.shard == 1),
        ),
        "clip": (f"optimizer.clip_norm={clip}", clip is not None),
        "no costs": ("schedule.costs=null", config.schedule.costs is None),
        "slices": (f"schedule.slices={config.schedule.slices}", config.schedule.num_slices > 1),
        "quantized": _quantized(config.model),
        "no lora": ("training all weights", config.finetune.adapters is None),
        "lora": ("finetune.lora", config.finetune.adapters is not None),
        "speeds": (f"parallel.speeds={parallel.speeds}", parallel.speeds is not None),
        "even cut": (f"model.layers_per_stage={cut}", cut == "null"),
        "chosen cut": (f"model.layers_per_stage={cut}", config.asks_for_cut),
        "costs": (f"schedule.costs={schedule.costs}", schedule.costs is not None),
        "recompute=auto": (recompute, memory.recompute == "auto"),
        "searched plan": (
            f"schedule={schedule.name}",
            schedule.timetable is None and takes_costs(schedule.name),
        ),
    }
    return {name: text for name, (text, is_on) in typed.items() if is_on}
