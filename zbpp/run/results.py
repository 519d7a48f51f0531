"""The files that a training run writes into its folder at the end, and the lines that it prints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.config import TrainConfig
from zbpp.error_text import shown_path
from zbpp.planning.memory_budget import RankMemory
from zbpp.render import chrome_trace, render_memory_picture, render_picture, render_report
from zbpp.runtime.memory.activation_offload import offload_plan_of
from zbpp.training.fine_tuned import save_adapter
from zbpp.training.loggers import Loggers, finite
from zbpp.training.measured_steps import MeasuredSteps, Summary, Title
from zbpp.training.memory_report import RankReport, figures
from zbpp.training.run_folder import write_whole
from zbpp.training.trainer import Trainer
from zbpp.training.weights import save_weights

if TYPE_CHECKING:
    from zbpp.prediction.measured_stages import MeasuredStages


def write_results(
    config: TrainConfig,
    path: Path,
    trainer: Trainer,
    measured: MeasuredStages | None,
    title: Title,
    summary: Summary,
    loggers: Loggers,
    *,
    is_rank_0: bool,
) -> None:
    """Write what the run has left: the memory of a step, the weights, the summary. Collective.

    measured: see `_write_memory`.
    """
    _write_memory(path, config, trainer, measured)
    if config.save_weights:
        _write_weights(config, path, trainer)
    if is_rank_0:
        _write_summary(path, title, summary, trainer, loggers)


def _write_weights(config: TrainConfig, path: Path, trainer: Trainer) -> None:
    """Write the weights that were trained: all, or the adapters alone."""
    lora = config.finetune.adapters
    if lora is None:
        save_weights(path, trainer.pipeline, trainer.masters)
        return
    base = config.model.get("path")
    save_adapter(path / "adapter", trainer.pipeline, lora, masters=trainer.masters, base=base)


def _write_memory(path: Path, config: TrainConfig, trainer: Trainer, measured: MeasuredStages | None) -> None:
    """Write memory.json and memory.png if a step's memory was recorded. Collective.

    measured: the bytes of the stages, on rank 0; None elsewhere.
    """
    report = trainer.memory_report
    if report is None or trainer.next_step <= report.step:
        return
    reports = report.gathered(trainer.pipeline)
    if measured is None:
        return
    pipeline = trainer.pipeline
    predicted = measured.predicted(
        pipeline.timetable, offload_plan_of(pipeline), is_validated_later=reports[0].is_validated_later
    )
    _write_report(path, predicted, reports, config.not_predicted)


def _write_summary(path: Path, title: Title, summary: Summary, trainer: Trainer, loggers: Loggers) -> None:
    """Write summary.json and the pictures of a measured step, and print the summary. On rank 0."""
    if summary.measured is not None:
        _write_pictures(path, title, summary.measured)
        loggers.picture("timeline", path / "timeline.png", trainer.next_step)
    loggers.summary = summary.figures
    # The last file: with it the run has ended.
    write_whole(path / "summary.json", json.dumps(finite(summary.figures), indent=2, allow_nan=False) + "\n")
    print(*summary.sentences, f"written to {shown_path(path)}", sep="\n", flush=True)
    if trainer.leaving is not None:
        print(f"left after step {trainer.next_step}: {trainer.leaving}; resume with resume=auto", flush=True)


def _write_pictures(folder: Path, title: Title, found: MeasuredSteps) -> None:
    """Write timeline.png and trace.json."""
    panels = {
        f"{title}: predicted from the costs of {found.steps}": found.predicted,
        f"{title}: measured, the median of {found.steps}": found.measured,
    }
    picture = io.BytesIO()  # matplotlib's errors name no file
    render_picture(panels, picture)
    write_whole(folder / "timeline.png", picture.getvalue())
    write_whole(folder / "trace.json", json.dumps(chrome_trace(panels)))


def _write_report(
    folder: Path, predicted: list[RankMemory], reports: list[RankReport], not_predicted: list[str]
) -> None:
    """Write memory.json and memory.png; print both peaks, and the tensors that outlive the step."""
    found = {**figures(predicted, reports), "not_predicted": not_predicted}
    picture = io.BytesIO()
    render_memory_picture(found, picture)
    write_whole(folder / "memory.json", json.dumps(found, indent=2) + "\n")
    write_whole(folder / "memory.png", picture.getvalue())
    print(render_report(found), flush=True)
