"""layers_per_stage="auto": the cut that `zbpp train model.layers_per_stage=auto` chooses for the same work.

Each process times a block of the model on its own device. On accelerators the cut stays within their free
memory; the prediction counts rows of `max_length` tokens (1024 if the arguments have no such key), and Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbpp.job.agreement import broadcast, gather
from zbpp.models.hf import HuggingFace
from zbpp.models.hf.quantize import kind_and_options
from zbpp.transformers.cut_model import base_of

if TYPE_CHECKING:
    from zbpp.config import TrainConfig

_LONGEST = 1024  # tokens of a row, where nobody says how many
_ROWS = 1 << 20
_SIZES = ("rank_pattern", "layers_to_transform", "layers_pattern", "use_dora", "modules_to_save")


class RandomRows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows of random tokens, and what follows each of them."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size, self._length = vocab_size, length

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(row)
        tokens = torch.randint(self._vocab_size, (self._length + 1,), generator=draw)
        return tokens[:-1], tokens[1:]


def options_of(model: Any) -> dict[str, Any]:
    """The arguments of HuggingFace that make a model like this one, a PreTrainedModel or PeftModel."""
    base = base_of(model)
    if not getattr(base, "is_quantized", False):
        return {"config": base.config.to_dict()}
    kind, options = kind_and_options(base.config.quantization_config)
    return {"path": base.config._name_or_path, "quantize": kind, "quantize_options": options}


def chosen_cut(
    options: Mapping[str, Any], adapters: Any, args: Any, schedule: str, num_ranks: int, num_replicas: int
) -> tuple[list[int], str]:
    """(how many layers each stage gets, the choice in words). Collective, over all processes of the job.

    options: of HuggingFace. adapters: a peft config, or None. args: TrainingArguments. schedule: one of
    zbpp.SCHEDULES. Raises ValueError, on all ranks, if no cut is within the free memory, and as
    `zbpp train` does for a model that can't be cut so.
    """
    from zbpp.config import with_values
    from zbpp.prediction.chosen_cut import chosen_cut as chosen
    from zbpp.run.app import build_parts
    from zbpp.run.cut import check_cut
    from zbpp.run.speeds import measured_ranks

    with torch.random.fork_rng([]):  # adapters are drawn behind this, alike on all ranks
        config = _config(options, adapters, args, schedule, num_ranks, num_replicas)
        check_cut(config, num_ranks)
        config = with_values(config, measured_ranks(_Job(), config, num_ranks, build_parts))
        found: tuple[list[int], str, str] = [], "", ""
        if torch.distributed.get_rank() == 0:
            try:
                choice = chosen(config, num_ranks)
                found = choice.changes["model.layers_per_stage"], choice.text(), ""
            except ValueError as error:
                found = [], "", f"layers_per_stage='auto': {error}"
    layers, text, refusal = broadcast(found)
    if refusal:
        raise ValueError(refusal)
    return layers, text


def _config(
    options: Mapping[str, Any], adapters: Any, args: Any, schedule: str, num_ranks: int, num_replicas: int
) -> TrainConfig:
    """A run of `zbpp train` that does the work of a Trainer's step."""
    from zbpp.config import TrainConfig
    from zbpp.config.commands import FinetuneConfig, ScheduleConfig
    from zbpp.config.train import MemoryConfig, ParallelConfig

    library: Any = HuggingFace(**options).library_config()
    text = library.get_text_config()
    length = getattr(args, "max_length", None) or _LONGEST
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    mixed = "mixed_bfloat16" if args.bf16 else "mixed_float16" if args.fp16 else "float32"
    is_narrow = "16" in str(options.get("dtype") or library.dtype)
    return TrainConfig(
        model={"_target_": "zbpp.models.hf.HuggingFace", **options, "layers_per_stage": "auto"},
        data={"_target_": f"{__name__}.RandomRows", "vocab_size": text.vocab_size, "length": length},
        microbatch_size=args.per_device_train_batch_size,
        num_microbatches=args.gradient_accumulation_steps,
        precision="bfloat16" if is_narrow else mixed,
        run_dir=args.output_dir,
        overwrite=True,  # nothing is kept there
        schedule=ScheduleConfig(name=schedule),
        finetune=FinetuneConfig(lora=_sizes_of(adapters)),
        memory=MemoryConfig(recompute="block" if args.gradient_checkpointing else "none"),
        parallel=ParallelConfig(
            num_processes=num_ranks * num_replicas, replicate=num_replicas, device=args.device.type
        ),
    )


def _sizes_of(adapters: Any) -> dict[str, Any]:
    """The keys of a LoraConfig that decide how large adapters are; none for other kinds, uncounted.

    Without target_modules, which peft would choose for the model, all linear layers count.
    """
    if adapters is None or str(adapters.peft_type).rpartition(".")[2] != "LORA":
        return {}
    plain = type(adapters)()
    found = {
        name: getattr(adapters, name) for name in _SIZES if getattr(adapters, name) != getattr(plain, name)
    }
    targets = adapters.target_modules or "all-linear"
    return {
        **found,
        "r": adapters.r,
        "target_modules": sorted(targets) if isinstance(targets, set) else targets,
    }


class _Job:
    """The processes of the job, which exchange texts: what zbpp.run.speeds asks of a Meeting."""

    def of_rank_0(self, _: str, text: str) -> str:
        return str(broadcast(text))

    def gather(self, _: str, text: str) -> list[str]:
        return gather(text)
