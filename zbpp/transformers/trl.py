"""What a pipeline does for Trainers of TRL alone: SFTTrainer and DPOTrainer.

compute_loss of TRL counts tokens and metrics, on the last stage's rank; they go to all ranks before they are
logged. DPO's reference figures are computed before the model is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zbpp.transformers.cut_model import CutModel
from zbpp.transformers.losses import OwnLoss
from zbpp.transformers.replicas import Replicas

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin: the Trainer's class comes behind it


def is_of_dpo(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch is DPO's, which has a loss without labels."""
    return "completion_mask" in inputs


class OfTrl(_Trainer):
    """A pipeline's part of TRL's classes; for others it does nothing."""

    _replicas: Replicas
    _cut: CutModel | None = None
    _own_loss: OwnLoss | None
    _metrics: Any
    _total_train_tokens: Any

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what compute_loss has counted on the last stage's rank."""
        if self._cut is not None and self._own_loss is not None and hasattr(self, "_total_train_tokens"):
            counted: Any = self._metrics, self._total_train_tokens
            self._metrics, self._total_train_tokens = self._cut.from_last(counted)
        super().log(logs, *args, **kwargs)

    @property
    def _counts_in_evaluation(self) -> bool:
        """Whether an evaluation divides by the targets of all replicas. TRL's takes each one's mean."""
        from transformers import Trainer

        found: Any = super().prediction_step
        return bool(found.__func__ is Trainer.prediction_step)

    def _precompute_ref_logps(self, dataset: Any, *args: Any) -> Any:
        """DPO's reference figures as columns of the data: rank 0 runs the whole model for them."""
        from datasets import Dataset, concatenate_datasets

        if self._cut is not None:
            raise ValueError(
                "the reference figures of data are computed before the model is cut: give eval_dataset when "
                "the DPOTrainer is made"
            )
        names, told = ("ref_chosen_logps", "ref_rejected_logps"), list[Any]([None])
        if self.accelerator.is_main_process:
            model: Any = self.model
            model.to(self.args.device)
            with self._replicas.as_one_process():
                made = super()._precompute_ref_logps(dataset, *args)  # type: ignore[misc]  # DPOTrainer's
            model.to("cpu")
            told[0] = {name: made[name] for name in names}
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0, device=self.args.device)
        return concatenate_datasets([dataset, Dataset.from_dict(told[0])], axis=1)
