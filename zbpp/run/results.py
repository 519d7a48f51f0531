"""The files that a training run writes into its folder at the end, and the lines that it prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

from zbpp.config import TrainConfig
from zbpp.error_text import shown_path
from zbpp.render import chrome_trace, render_picture
from zbpp.training.loggers import Loggers, finite
from zbpp.training.lora import save_adapter
from zbpp.training.measured_steps import MeasuredSteps, Summary, Title
from zbpp.training.run_folder import write_whole
from zbpp.training.trainer import Trainer
from zbpp.training.weights import save_weights


def write_results(
    config: TrainConfig,
    path: Path,
    trainer: Trainer,
    title: Title,
    summary: Summary,
    loggers: Loggers,
    *,
    is_rank_0: bool,
) -> None:
    """Write what the run has left: the weights, the summary. Collective."""
    if config.save_weights:
        with trainer.averaged():
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
    predicted = f"{title}: predicted from the costs of {found.steps}"
    panels = {
        predicted: found.predicted,
        f"{title}: measured, the median of {found.steps}": found.measured,
    }
    costs = {predicted: found.costs}
    picture = io.BytesIO()  # matplotlib's errors name no file
    render_picture(panels, picture, costs=costs)
    write_whole(folder / "timeline.png", picture.getvalue())
    write_whole(folder / "trace.json", json.dumps(chrome_trace(panels, costs)))
