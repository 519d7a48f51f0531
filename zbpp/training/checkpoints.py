"""Saves a run's checkpoints between steps, in the background if wanted, and resumes a run from one.

A checkpoint of step n is written when the metrics of step n have been logged, so a resumed run misses no line
of metrics.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zbpp.checkpoints import Checkpoint, CheckpointError, Saving, opened, prepared, restore
from zbpp.error_text import shown_path
from zbpp.job.agreement import refuse_together
from zbpp.runtime.processes.dtensors import local_of
from zbpp.schedule import Timetable
from zbpp.training.optim.update import Metrics
from zbpp.training.trainer import Callback, Trainer


class Checkpoints(Callback):
    """Saves every `every` steps, when a run is left early, and at the end of a run that has checkpoints.

    folder: gets a subfolder per checkpoint. every: steps; with 0, only a run that is left early is saved.
    keep: how many checkpoints stay. background: whether training goes on while a checkpoint is written; the
    state is copied first. config: the run's config by dotted key; each checkpoint holds it.

    A checkpoint of weights that are not finite is not written: it would replace a good one.
    If a checkpoint can't be written, the first process reports this, and training goes on; but the last
    checkpoint of a run that is left early raises CheckpointError.
    """

    def __init__(
        self, folder: Path, *, every: int, keep: int, background: bool, config: Mapping[str, Any]
    ) -> None:
        self._folder, self._every, self._keep, self._config = folder, every, keep, config
        self._background = background
        self._saving: tuple[int, Saving] | None = None  # the step and checkpoint that are being written
        self._last = 0  # the step of the newest whole checkpoint
        self._stood_still = 0.0  # s, for checkpoints since the last metrics

    def needs_weights(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return self._is_due(step + 1)

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Save if a checkpoint is due. The metrics of the step before have been logged by now."""
        if self._is_due(step) and step > self._last:
            self._save(trainer, step, in_background=self._background)

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Add to the metrics how long training stood still for a checkpoint."""
        if known and self._stood_still:
            known[-1]["checkpoint_seconds"] = self._stood_still
            self._stood_still = 0.0

    def finish(self, trainer: Trainer) -> None:
        """Save the last step if it is not saved yet, and wait until it is written."""
        self._settle()
        step, leaves = trainer.next_step, trainer.leaving is not None
        # Without a checkpoint of the last step, the same command would resume this ended run at an older one.
        if step > self._last and (leaves or self._last or self._every):
            error = self._save(trainer, step, in_background=False)
            if error and leaves:
                raise CheckpointError(error)

    def stopped(self, trainer: Trainer) -> None:
        """Wait until the checkpoint under way is written. The present weights are not saved."""
        self._settle()

    def resume(self, trainer: Trainer, source: Path, num_steps: int, *, has_ended: bool = True) -> None:
        """Let the trainer go on from the newest whole checkpoint in `source`, or from `source` itself.

        has_ended: whether the run in the folder has written its summary. A run that was killed between its
        last checkpoint and its summary has all steps done, and still has to end. Raises CheckpointError, on
        every process, for a checkpoint that does not fit this run. Collective.
        """
        is_own = self._folder.resolve() in (source.resolve(), source.resolve().parent)
        found = opened(source, trainer.pipeline.place, is_own=is_own)
        _check_rows(found, trainer, self._config)
        if found.step > num_steps or (found.step == num_steps and (has_ended or not is_own)):
            raise CheckpointError(
                f"{found.path} has done {found.step} steps already: write steps={2 * found.step} to go on "
                "with that run, another run_dir to begin a new one, or overwrite=true to replace it"
            )
        changed = self._changes(found)
        other_options = [key for key in changed if key.startswith(_OF_OPTIMIZER)]
        is_fresh = self._leaves_optimizer_out(changed)
        if other_options and trainer.scheduler is not None and not is_fresh:
            raise CheckpointError(
                f"{found.path} holds the learning rates of its lr_scheduler, and this run changes "
                f"{', '.join(other_options)}: leave them as they were"
            )
        left_out = {"scheduler"} if is_fresh else set()
        states = trainer.states().keys() & found.facts["states"].keys() - left_out
        restore(
            found,
            trainer.pipeline,
            None if is_fresh else trainer.optimizer,
            masters=trainer.masters,
            states={name: trainer.states()[name] for name in sorted(states)},
            keep_options=bool(other_options),
        )
        ahead = found.facts["info"].get("messages_ahead", 0)
        trainer.go_on_after(found.step, _replanned(found), ahead)
        if found.path.parent.resolve() == self._folder.resolve():  # resume= may be relative, or a link
            self._last = found.step
        if _is_first(trainer):
            _say_what_changed(found, trainer, changed)

    def _changes(self, found: Checkpoint) -> dict[str, tuple[Any, Any]]:
        """The values of the config that differ from those of the checkpoint's run."""
        before = found.facts["info"]["config"]
        keys = sorted(before.keys() | self._config.keys())
        pairs = {key: (before.get(key), self._config.get(key)) for key in keys}
        return {key: (old, new) for key, (old, new) in pairs.items() if old != new}

    def _leaves_optimizer_out(self, changed: Mapping[str, Any]) -> bool:
        """Whether the optimizer begins with fresh states: `resume_optimizer=false`, in the first start.

        A checkpoint of the same settings is of an earlier start of this run, whose optimizer goes on.
        """
        is_wanted = not self._config.get("resume_optimizer", True)
        return is_wanted and any(key.startswith(("resume_optimizer", *_OF_OPTIMIZER)) for key in changed)

    def _is_due(self, step: int) -> bool:
        return step > 0 and self._every > 0 and step % self._every == 0

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written. A failure was reported already."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        with suppress(CheckpointError):
            saving.wait()
            self._last = max(self._last, step)

    def _save(self, trainer: Trainer, step: int, *, in_background: bool) -> str:
        """Save a checkpoint; returns why that is not possible, or nothing."""
        begin = time.perf_counter()
        try:
            self._settle()
            check_savable(trainer)
            saving = prepared(
                self._folder,
                trainer.pipeline,
                trainer.optimizer,
                step=step,
                masters=trainer.masters,
                keep=self._keep,
                info=self._info(trainer),
                states=trainer.states(),
            )
            if in_background:
                saving.write_in_background(_report)
                self._saving = step, saving
            else:
                saving.write()
                saving.wait()
                self._last = step
        except CheckpointError as error:
            if _is_first(trainer):
                _report(str(error))
            return str(error)
        finally:
            self._stood_still += time.perf_counter() - begin
        return ""

    def _info(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "config": dict(self._config),
            "items_per_step": trainer.items_per_step,
            "unit": trainer.data.unit,
            "fingerprint": trainer.data.fingerprint,
            "is_replanned": trainer.is_replanned,
            "messages_ahead": trainer.messages_ahead,
        }


# Keys that change an optimizer's options. optimizer.lr_schedule and its numbers don't: they may change.
_OF_OPTIMIZER = tuple(
    f"optimizer.{name}"
    for name in (
        "name", "build", "groups", "learning_rate", "beta", "eps", "weight_decay", "lr_scheduler",
    )
)  # fmt: skip


def _report(why: str) -> None:
    print(f"CHECKPOINT FAILED: {why}; training goes on, earlier checkpoints stay as they are", flush=True)


def _is_first(trainer: Trainer) -> bool:
    place = trainer.pipeline.place
    return place.is_first and place.rank == 0


def _check_rows(found: Checkpoint, trainer: Trainer, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if steps now read other rows: the step is the position in the data."""
    info = found.facts["info"]
    if not {"items_per_step", "unit", "fingerprint", "config", "is_replanned"} <= info.keys():
        raise CheckpointError(f"{found.path} was not written by a run of zbpp train: load it with zbpp.load")
    was_by_tokens, is_by_tokens = _is_by_tokens(info["config"]), _is_by_tokens(config)
    if info["items_per_step"] == trainer.items_per_step and was_by_tokens == is_by_tokens:
        return
    same = "" if was_by_tokens == is_by_tokens else f"data.batching={'tokens' if was_by_tokens else 'rows'} "
    size = (
        f"data.tokens_per_batch={info['items_per_step']}"
        if was_by_tokens
        else "num_microbatches=... or microbatch_size=... so that num_microbatches x microbatch_size x "
        "parallel.replicate x parallel.shard is what it was"
    )
    raise CheckpointError(
        f"{found.path} was trained on {info['items_per_step']} {info['unit']} per step"
        f"{' (data.batching=tokens)' * was_by_tokens}, and this run has {trainer.items_per_step}"
        f"{' (data.batching=tokens)' * is_by_tokens}, so the step does not say which data come next: write "
        f"{same}{size}"
    )


def _is_by_tokens(config: Mapping[str, Any]) -> bool:
    return config.get("data.batching") == "tokens"


def _replanned(found: Checkpoint) -> Timetable | None:
    """The plan that the checkpoint's run made for its measured costs, if it made one."""
    return Timetable.parse(found.facts["timetable"]) if found.facts["info"]["is_replanned"] else None


_EXPECTED = ("run_dir", "resume", "overwrite", "stop_after")  # keys whose change is not worth a line


def _say_what_changed(found: Checkpoint, trainer: Trainer, changed: Mapping[str, tuple[Any, Any]]) -> None:
    text = ", ".join(
        f"{key}={new} (was {old})" for key, (old, new) in changed.items() if key not in _EXPECTED
    )
    print(
        f"going on after step {found.step} of {shown_path(found.path)}" + (f", with {text}" if text else ""),
        flush=True,
    )
    if found.facts["info"]["fingerprint"] != trainer.data.fingerprint:
        print("the data differ from those that this checkpoint was trained on", flush=True)


# ----------------------------------------------------------------
# Whether the state of a run may be saved: a checkpoint of NaN weights would replace a good one.


def check_savable(trainer: Trainer) -> None:
    """Raise CheckpointError, on all processes, for trained weights that aren't finite. Collective.

    Frozen weights and buffers may hold infinities on purpose (masks).
    """
    bad = _first_not_finite(trainer)
    refusal = bad and f"parameter {bad} is NaN or infinite, so this state is not saved"
    refuse_together(refusal, trainer.pipeline.place.gather, CheckpointError)


@torch.no_grad()
def _first_not_finite(trainer: Trainer) -> str:
    """The name of the first trained weight with such a value; "" if there is none. One transfer."""
    names, flags = [], []
    for name, parameter in trainer.pipeline.named_parameters():
        trained = parameter if trainer.masters is None else trainer.masters.of(parameter)
        local = local_of(trained.detach())
        if parameter.requires_grad and local.is_floating_point() and local.dtype.itemsize > 1:
            names.append(name)
            flags.append(local.isfinite().all().to(trainer.pipeline.device))
    found = torch.stack(flags).tolist() if flags else []
    return next((name for name, is_finite in zip(names, found, strict=True) if not is_finite), "")
