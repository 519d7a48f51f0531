"""Which loss a Trainer has, and its own compute_loss on the last stage.

zbpp's own         the Trainer's loss is the model's, a mean over targets: the last stage's head computes it
the Trainer's own  label smoothing, compute_loss_func, or a subclass with another compute_loss (SFTTrainer):
                   the last stage gives logits, and compute_loss runs there, for each microbatch, with a
                   stand-in for the model
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zbpp.stage_api import IGNORED
from zbpp.transformers.batches import Inputs, check_columns
from zbpp.transformers.cut_model import base_of


def has_own_loss(trainer: Any) -> bool:
    """Whether a Trainer's loss is another one than the mean over targets that a causal model computes."""
    from transformers import Trainer
    from transformers.loss.loss_utils import ForCausalLMLoss

    is_plain = type(trainer).compute_loss is Trainer.compute_loss and trainer.model_accepts_loss_kwargs
    is_plain = is_plain and base_of(trainer.model).loss_function is ForCausalLMLoss
    return not is_plain or trainer.label_smoother is not None or trainer.compute_loss_func is not None


class OwnLoss:
    """loss(logits, batch) -> what the Trainer's compute_loss gives for one microbatch.

    num_items: of the step, as the Trainer counts them. weight: a factor on the loss. The Trainer sums over
    microbatches what it has divided by num_items, and divides by their number what it has not; a pipeline
    takes the mean over planned microbatches.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.num_items: Any = None
        self.weight = 1.0

    def begin_step(self, num_items: Any, num_microbatches: int, num_planned: int) -> None:
        """Set num_items and weight for a step of so many microbatches."""
        from transformers import Trainer

        trainer, self.num_items, is_divided = self._trainer, num_items, None
        if hasattr(Trainer, "loss_is_scaled_for_ga"):  # not in 5.17, which asks nobody
            is_divided = trainer.loss_is_scaled_for_ga
        if is_divided is None:
            is_divided = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and num_items is not None
            )
        self.weight = num_planned if is_divided else num_planned / num_microbatches

    def begin_evaluation(self, num_items: Any) -> None:
        """Set num_items and weight for a batch that is evaluated as one."""
        self.num_items, self.weight = num_items, 1.0

    def __call__(self, logits: Tensor, inputs: Inputs) -> Tensor:
        if logits.dtype != torch.float64:
            logits = logits.float()  # accelerate casts the outputs of a model under autocast
        stand_in = StandIn(base_of(self._trainer.model), logits, inputs["input_ids"])
        with torch.autocast(logits.device.type, enabled=False):
            loss: Tensor = self._trainer.compute_loss(
                stand_in, dict(inputs), num_items_in_batch=self.num_items
            )
        return loss * self.weight


class StandIn:
    """Stands in for the model in compute_loss, on the last stage: a call gives the logits that there are.

    Other names are those of the model. A call raises ValueError for other tokens than the batch's, and for
    arguments that ask for more than logits.
    """

    def __init__(self, model: Any, logits: Tensor, input_ids: Tensor) -> None:
        self._model, self._logits, self._input_ids = model, logits, input_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        fused_lm_head: bool = False,
        **inputs: Any,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if input_ids is None or not torch.equal(input_ids, self._input_ids):
            raise ValueError(
                "compute_loss runs the model on other tokens than the batch's, which a pipeline can't do"
            )
        _check_call(inputs)
        if fused_lm_head:
            assert labels is not None
            return _fused_outputs(self._logits, labels, shift_labels)
        given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
        given = {name: value for name, value in given.items() if value is not None}
        size, loss = self._model.config.get_text_config().vocab_size, None
        if labels is not None:
            loss = self._model.loss_function(logits=self._logits, labels=labels, vocab_size=size, **given)
        return CausalLMOutputWithPast(loss=loss, logits=self._logits)


def _check_call(inputs: dict[str, Any]) -> None:
    names: Iterable[str] = [
        name for name, value in inputs.items() if value is not None and value is not False
    ]
    for name in names:
        if name.startswith("output_"):
            raise ValueError(f"compute_loss asks the model for {name}, and the last stage has logits alone")
    check_columns(names)


def _fused_outputs(logits: Tensor, labels: Tensor, shift_labels: Tensor | None) -> Any:
    """What the model returns after TRL has fused its head (add_fused_lm_head in trl/trainer/utils.py)."""
    if shift_labels is None:
        logits, labels = logits[:, :-1], labels[:, 1:]
    else:
        labels = shift_labels
    mask = labels != IGNORED
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(-1).masked_fill(~mask, 0)
        is_top1 = (logs.argmax(-1) == labels).masked_fill(~mask, False)
        mean = logits.mean(-1).masked_fill(~mask, 0)
    return SimpleNamespace(
        log_probs=chosen,
        entropy=entropy,
        is_top1=is_top1,
        label_mask=mask,
        mean_logits=mean,
        aux_loss=None,
    )
