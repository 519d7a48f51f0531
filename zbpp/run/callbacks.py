"""The callbacks and loggers of a run, from its config: figures, profile, samples, saving, metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zbpp.config import ConfigError, LoggerConfig, TrainConfig, instantiate_node, naming
from zbpp.data import Data
from zbpp.data.prepared import HEADER, TOKENIZER, open_prepared
from zbpp.data.tokenizer import begin_and_ends, load_tokenizer
from zbpp.error_text import kind_of
from zbpp.job.agreement import broadcast
from zbpp.job.world import World
from zbpp.training.callbacks import Callback, Profile
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.leaving import StopAfter
from zbpp.training.loggers import JsonLines, Logger, Loggers, TensorBoard, Wandb
from zbpp.training.measured_steps import LiveFigures
from zbpp.training.optim.precision import PRECISIONS
from zbpp.training.run_folder import CHECKPOINTS, RunFolder
from zbpp.training.sampling import Bytes, Coder, Sampler, TokenizerFile
from zbpp.training.trainer import Trainer


def build_callbacks(
    config: TrainConfig, data: Data, here: World, folder: Path, loggers: Loggers
) -> list[Callback]:
    """This rank's callbacks beside the user's: figures, samples, a profile. Raises ConfigError."""
    callbacks: list[Callback] = [LiveFigures(here, PRECISIONS[config.precision].compute)]
    if config.sample.every:
        callbacks.append(_sampler(config, data, loggers))
    if config.profile is not None:
        callbacks.append(Profile(config.profiled_steps, folder / "profile" / f"rank-{here.rank}.json"))
    return callbacks


def build_own_callbacks(config: TrainConfig) -> list[Callback]:
    """The user's callbacks, which the config names by `_target_`. Raises ConfigError.

    The trainer is made with them, since a checkpoint holds the states of those that have one.
    """
    return [_own_callback(f"callbacks[{number}]", node) for number, node in enumerate(config.callbacks)]


def _own_callback(part: str, node: Any) -> Callback:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{part}={node}: write a class of yours as {{_target_: my_file.MyCallback}}")
    made = instantiate_node(part, node)
    if not isinstance(made, Callback):
        raise ConfigError(
            f"{part} ({node['_target_']}): the call returns {kind_of(made)}, not a "
            "zbpp.training.callbacks.Callback: derive the class from it"
        )
    return made


def _sampler(config: TrainConfig, data: Data, loggers: Loggers) -> Sampler:
    if data.unit != "tokens":
        raise ConfigError(f"sample.every={config.sample.every}: the data are {data.unit}, no text; write 0")
    options = config.sample
    with naming("sample"):
        coder, ends = _coder(config)
        check_prompt(coder.encode(options.prompt), config.data.get("vocab_size"))
        return Sampler(
            options.prompt,
            coder,
            ends=ends,
            every=options.every,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=config.seed,
            window=config.data.get("sequence_length"),
            log=loggers.sample,
        )


def check_prompt(tokens: Sequence[int], vocab_size: int | None) -> None:
    """Raise ValueError for a token that the model lacks: a tokenizer of another model is named."""
    if vocab_size is not None and max(tokens, default=0) >= vocab_size:
        raise ValueError(
            f"the prompt has token {max(tokens)}, and the model's vocab_size is {vocab_size}: write "
            "sample.tokenizer=FILE, the tokenizer that the data were made with"
        )


def _coder(config: TrainConfig) -> tuple[Coder, frozenset[int]]:
    """(the tokenizer of the sampled text, the tokens that end a text).

    The tokenizer is that of `sample`, else that of `data`, else bytes.
    """
    path = config.sample.tokenizer or config.data.get("tokenizer")
    source = str(config.data.get("path") or (config.data.get("mixture") or [{}])[0].get("path") or "")
    ends: frozenset[int] = frozenset()
    if (Path(source) / HEADER).is_file():
        end = open_prepared(source).header.end_token
        ends = ends if end is None else frozenset({end})
        if path is None and (Path(source) / TOKENIZER).is_file():
            path = str(Path(source) / TOKENIZER)
    if path is not None:
        # For conversations, data.tokenizer is a folder of transformers.
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        tokenizer = load_tokenizer(file)
        begin, others = begin_and_ends(tokenizer, file.parent)
        # Text and tokens to train on have no BOS: a new model does not know the token.
        is_known = config.model.get("path") is not None or "chat_template" in config.data
        return TokenizerFile(tokenizer, begin if is_known else None), ends | others
    if source.endswith((".npy", ".bin")):
        raise ValueError(
            f"data.path={source} holds tokens, and nothing says what text they are: write "
            "sample.tokenizer=FILE"
        )
    return Bytes(), ends


# ----------------------------------------------------------------
# The callbacks that save a run and leave it, from the config; and going on from a checkpoint.


def build_saving(
    config: TrainConfig,
    settings: Mapping[str, Any],
    path: Path,
    trainer: Trainer,
    folder: RunFolder | None,
) -> list[Callback]:
    """Callbacks that save and leave the run. If `folder` names a checkpoint, the trainer goes on from it.

    settings: the config by dotted key, without run_dir. folder: on rank 0, None elsewhere. path: that
    folder's path, on every rank. Collective.
    """
    options = config.checkpoint
    checkpoints = Checkpoints(
        path / CHECKPOINTS,
        every=options.every,
        keep=options.keep,
        background=options.background,
        config=settings,
    )
    source, has_ended = broadcast(None if folder is None else (_below(folder), folder.has_ended))
    if source is not None:
        checkpoints.resume(trainer, path / source, config.steps, has_ended=has_ended)
    return [checkpoints, *([] if config.stop_after is None else [StopAfter(config.stop_after)])]


def _below(folder: RunFolder) -> Path | None:
    """The source, relative to the run's folder if it lies there: on other nodes its path may differ."""
    if folder.source is not None and folder.source.is_relative_to(folder.path):
        return folder.source.relative_to(folder.path)
    return folder.source


# ----------------------------------------------------------------
# The loggers of a run from the config: where its metrics go.


def build_loggers(
    options: LoggerConfig, folder: Path, settings: Mapping[str, Any], first_step: int = 0
) -> list[Logger]:
    """metrics.jsonl in the run's folder; wandb and TensorBoard if the config asks for them.

    wandb's own variables, WANDB_PROJECT and WANDB_MODE, say where its run is.

    settings: the run's config as values by dotted key, which both show. first_step: how many steps
    were done before.
    """
    loggers: list[Logger] = [JsonLines(folder)]
    if options.wandb:
        project, mode = os.environ.get("WANDB_PROJECT", "zbpp"), os.environ.get("WANDB_MODE", "online")
        loggers.append(Wandb(folder, project=project, mode=mode, config=settings, goes_on=first_step > 0))
    if options.tensorboard:
        loggers.append(TensorBoard(folder, config=settings, first_step=first_step))
    return loggers
