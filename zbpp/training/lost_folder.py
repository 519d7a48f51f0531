"""What a run does when its folder is deleted while it trains: it saves itself there and ends with an error.

The weights in memory are then the only ones, since the checkpoints are gone, too. If another job has begun a
run in the folder meanwhile, nothing is written, and the run ends at once.
"""

from __future__ import annotations

from zbpp.error_text import shown_path
from zbpp.training.callbacks import Callback
from zbpp.training.run_files import FolderError
from zbpp.training.run_folder import RunFolder
from zbpp.training.trainer import Trainer
from zbpp.training.update import Metrics


class LeaveLostFolder(Callback):
    """Checks after each step that the folder is still there, on the rank that has claimed it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._is_lost = False

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """If the folder is gone, make it anew, and let the run leave; the run saves a checkpoint first."""
        if self._folder.is_there() or not self._folder.make_again():
            return
        self._is_lost = True
        print(
            f"run_dir={shown_path(self._folder.path)} was deleted: the run saves itself there and ends",
            flush=True,
        )
        trainer.leave("run_dir was deleted")

    def check(self, trainer: Trainer) -> None:
        """Raise FolderError if the run has left because of its folder."""
        if self._is_lost and trainer.leaving is not None:
            raise FolderError(
                f"run_dir={shown_path(self._folder.path)} was deleted while the run was training. "
                f"metrics.jsonl and a checkpoint of step {trainer.next_step} are there again; earlier "
                "checkpoints are gone. Start the same command again: with resume=auto it goes on"
            )
