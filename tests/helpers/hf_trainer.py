"""A small training run by transformers.Trainer in one process, or in a pipeline, with all that it leaves."""

import os
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file

NONE: Mapping[str, Any] = {}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 5,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 2,  # 25 rows: 13 batches, the last one smaller; 4 steps, the last one of one batch
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 1.39,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 4,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 7,
    "bf16": False,
}


class Case(NamedTuple):
    """What a run trains. kind: of model, with `sizes` in its config. arguments: in place of ARGUMENTS.

    schedule: "" for one process. options: of in_pipeline. change(model) -> model. kit(case, folder) ->
    (trainer class, its arguments); None: `plain`. trainer(class) -> a subclass of it. more: further arguments
    of the Trainer. finish(trainer) -> what the run returns beside the rest.
    """

    schedule: str = ""
    kind: str = "llama"
    sizes: Mapping[str, Any] = NONE
    arguments: Mapping[str, Any] = NONE
    change: Any = None
    more: Mapping[str, Any] = NONE
    resume: str | None = None
    options: Mapping[str, Any] = NONE
    trainer: Any = None
    finish: Any = None
    kit: Any = None


class Left(NamedTuple):
    """What a run leaves: the logs of its steps, its weights, and what `finish` returned."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    found: Any


def rows(count, seed, longest=12):
    """Sequences of different lengths, in which each token depends on the one before."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        start, step = draw.randrange(1, 40), draw.randrange(1, 4)
        tokens = [1 + (start + step * i) % 39 for i in range(draw.randrange(4, longest))]
        found.append({"input_ids": tokens, "labels": [-100, *tokens[1:]]})
    return found


def padded(found):
    """A batch of rows, filled up on the right."""
    length = max(len(each["input_ids"]) for each in found)
    fill = {"input_ids": 0, "labels": -100}
    columns = {
        name: torch.tensor([[*each[name], *[value] * (length - len(each[name]))] for each in found])
        for name, value in fill.items()
    }
    columns["attention_mask"] = (columns["input_ids"] != 0).long()
    return columns


def model_of(case):
    """The library's model with random weights."""
    import transformers

    torch.manual_seed(1)
    ids = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values = {**ids, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, **case.sizes}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(case.kind, **values)
    )
    return model if case.change is None else case.change(model)


def plain(case, folder):
    """The Trainer of transformers, and data that are tokenized."""
    import transformers

    args = transformers.TrainingArguments(output_dir=f"{folder}/run", **{**ARGUMENTS, **case.arguments})
    return transformers.Trainer, {
        "model": model_of(case),
        "args": args,
        "train_dataset": rows(25, 3),
        "eval_dataset": rows(12, 4),
        "data_collator": padded,
    }


def trained(rank, case, folder):
    """Run a case in `folder` and return what it leaves; weights on rank 0."""
    import tqdm

    from zbpp.transformers import in_pipeline

    tqdm.tqdm.monitor_interval = 0  # its thread would be left over
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:  # torchrun sets these
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        os.environ.update(OMP_NUM_THREADS="1")
    chosen, given = (case.kit or plain)(case, folder)
    if case.schedule:
        chosen = in_pipeline(chosen, schedule=case.schedule, **case.options)
    if case.trainer is not None:
        chosen = case.trainer(chosen)
    trainer = chosen(**{**given, **case.more})
    trainer.train(resume_from_checkpoint=case.resume)
    found = [] if case.finish is None else case.finish(trainer)
    trainer.save_model(f"{folder}/final")
    if case.schedule:
        trainer.pipeline.close()
    forget_accelerate()
    return Left(trainer.state.log_history, weights_in(f"{folder}/final") if rank == 0 else {}, found)


def forget_accelerate():
    """Let accelerate ask for the processes anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights_in(folder):
    """The tensors of a folder with weights or an adapter."""
    names = ("model.safetensors", "adapter_model.safetensors")
    return load_file(next(f"{folder}/{name}" for name in names if os.path.exists(f"{folder}/{name}")))


FIGURES = ("loss", "grad_norm", "learning_rate", "accuracy", "mean_token_accuracy", "entropy", "num_tokens")


def figures(logs, first=0):
    """{name: its values} in the logs of a run, from a step on."""
    return {
        name: [each[name] for each in logs if name in each and each["step"] >= first]
        for name in (*FIGURES, *(f"eval_{each}" for each in FIGURES))
        if any(name in each for each in logs)
    }


def assert_same(left, expected, *, rel=1e-6, weights=1e-5, first=0):
    """Compare two runs. weights: relative to the largest weight of each tensor."""
    import pytest

    found, known = figures(left.logs, first), figures(expected.logs, first)
    assert found.keys() == known.keys()
    assert len(known["loss"]) > 1
    for name, values in known.items():
        assert found[name] == pytest.approx(values, rel=rel, nan_ok=True), name
    assert left.weights.keys() == expected.weights.keys()
    for name, each in expected.weights.items():
        error = (left.weights[name] - each).abs().max() / each.abs().max()
        assert error <= weights, (name, error)
