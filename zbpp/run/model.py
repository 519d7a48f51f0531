"""The user's model from its config node, and this rank's stages of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.config import ConfigError, FinetuneConfig, TrainConfig, instantiate_node, naming
from zbpp.error_text import kind_of
from zbpp.job.errors import is_out_of_memory
from zbpp.runtime.restored import Buffers, eval_mode
from zbpp.runtime.stage import FORWARD_NOTE, LOSS_NOTE
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel, batch_norms, mark_of, missing_methods, stage_of
from zbpp.training.optim.precision import Precision


def build_model(node: dict[str, Any], seed: int = 0, finetune: FinetuneConfig | None = None) -> Any:
    """The model that the node's `_target_` names.

    The model gets `seed` if it takes a seed and the node gives none. finetune: which parameters are trained.
    Raises ConfigError.
    """
    model = instantiate_node("model", node, **({} if "seed" in node else {"seed": seed}))
    if not isinstance(model, PipelineModel):
        missing = missing_methods(model)
        raise ConfigError(
            f"model: {type(model).__name__} lacks {' and '.join(missing)}: a model is a class that has "
            "these methods, see the tutorial (docs/tutorial.md)"
        )
    _check_loss(model.loss)
    return model if finetune is None else _fine_tuned(model, finetune, seed)


def _fine_tuned(model: Any, options: FinetuneConfig, seed: int) -> Any:
    """The model with frozen parameters or adapters; itself where nothing of it is fine-tuned."""
    if not options.is_on:
        return model
    from zbpp.training.fine_tuned import FineTuned

    with naming("finetune"):
        try:
            return FineTuned(
                model, freeze=options.freeze, train=options.train, lora=options.adapters, seed=seed
            )
        except TypeError as error:  # peft, of a key that it does not know
            raise ConfigError(f"finetune.lora: {error}") from error


def _check_loss(loss: object) -> None:
    """Raise ConfigError for a loss with trainable parameters, which belong to no stage."""
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    if trained:
        raise ConfigError(
            f"model: its loss is {kind_of(loss)} with trainable parameters ({', '.join(trained)}), "
            "which no stage owns, so they are neither moved to the device nor saved: give them to the last "
            "stage, whose output the loss then gets"
        )


def build_stages(model: PipelineModel, timetable: Timetable, rank: int) -> dict[int, nn.Module]:
    """{stage index: module} of this rank, on the CPU. Raises ConfigError."""
    num_stages = timetable.num_stages
    with naming("model"):
        return {index: stage_of(model, index, num_stages) for index in timetable.stages_of(rank)}


def layers_per_stage(model: Any, num_stages: int) -> list[int] | None:
    """How many layers each stage gets; None if the model can't say. Raises ConfigError for too few layers."""
    if not hasattr(model, "layer_counts"):
        return None
    with naming("model"):
        counts: list[int] = model.layer_counts(num_stages)
    return counts


def cut_that_may_change(config: TrainConfig, num_stages: int) -> list[int] | None:
    """How many layers each stage gets; None if model.layers_per_stage can't change that."""
    model = build_model(config.model, config.seed)
    takes_it = "layers_per_stage" in inspect.signature(type(model)).parameters
    return layers_per_stage(model, num_stages) if takes_it else None


def keeps_documents_apart(model: Any, num_stages: int) -> bool:
    """Whether a row may hold several documents, as the model says. Raises ConfigError as its cut does."""
    if not hasattr(model, "keeps_documents_apart"):
        return False
    with naming("model"):
        return bool(model.keeps_documents_apart(num_stages))


def metrics_of(model: Any, precision: Precision) -> Callable[[Any, Any], Mapping[str, float | Tensor]] | None:
    """The model's metrics(output, target), see zbpp/stage_api.py; None if it has no such method."""
    found = getattr(model, "metrics", None)
    return precision.widened(found) if callable(found) else None


# ---- Do the data fit the model?


def check_data_fit(stages: Mapping[int, nn.Module], microbatch: Sequence[Any]) -> None:
    """Run stage 0, if this rank has it, on its inputs of one microbatch. Raises ConfigError.

    In eval mode and without a graph, on the device that the stage and the inputs are on. Buffers keep their
    values: a stage may count its forwards.
    """
    if 0 not in stages:
        return
    inputs = ", ".join(map(_type_and_shape, microbatch))
    buffers = Buffers([stages[0]])
    buffers.keep()
    with explained_as_data(f"stage 0 was given {inputs}"), eval_mode([stages[0]]), torch.no_grad():
        stages[0](*microbatch)
    buffers.restore()


def check_loss_is_counted(model: PipelineModel) -> None:
    """Raise ConfigError for a loss that doesn't say how many targets it is a mean over.

    Microbatches of tokens have different numbers of targets: a mean of their means depends on how a batch is
    cut, and padding counts as a target.
    """
    if mark_of(model.loss, "num_targets") is None:
        raise ConfigError(
            "data.batching=tokens needs a loss that says how many targets it is a mean over, and the loss of "
            f"{type(model).__name__} does not: mark it by zbpp.stage_api.mean_over_tokens, whose -100 is no "
            "target, or by mean_over(count)"
        )


def check_lengths_may_differ(stages: Mapping[int, nn.Module]) -> None:
    """Raise ConfigError for a stage whose statistics depend on padding and on the length of a microbatch."""
    for index, stage in stages.items():
        if next(batch_norms(stage), None) is not None:
            raise ConfigError(
                f"data.batching=tokens doesn't go with BatchNorm, which stage {index} has: its statistics "
                "would count padding; write data.batching=rows, or take another norm"
            )


@contextmanager
def explained_as_data(where: str) -> Iterator[None]:
    """Turn an error that a forward raises, as for inputs of a wrong type or shape, into a ConfigError."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"the data do not fit the model: {where}: {first_line}; write another data=, or see its keys "
            "(ZBPP_TRACEBACK=1 shows where)"
        ) from error


@contextmanager
def explained_as_boundary(is_first_step: Callable[[], bool]) -> Iterator[None]:
    """Turn what a forward behind stage 0, or the loss, raises in the first step into a ConfigError of a line.

    These get their inputs only in a step. In later steps, and of other types, an error is a bug.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        notes = [*getattr(error, "__notes__", ())]
        is_of_boundary = any(note.startswith((FORWARD_NOTE, LOSS_NOTE)) for note in notes)
        if type(error) not in _OF_TORCH or not is_of_boundary or not is_first_step():
            raise
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"the stages or the loss do not fit together: {'; '.join([first_line, *notes])} "
            "(ZBPP_TRACEBACK=1 shows where)"
        ) from error


_OF_TORCH = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    IndexError,
)  # for wrong dtypes and shapes


def _type_and_shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
