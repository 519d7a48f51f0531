"""Mistakes of a pipeline that a loss curve does not show, planted: each is found."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from helpers.hf_trainer import Case, assert_same, trained
from helpers.processes import outcomes, run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TIED = Case(
    sizes={"tie_word_embeddings": True},
    arguments={"eval_strategy": "no", "save_strategy": "no", "max_steps": 5},
    schedule="zb_h1",
)


def own_norm(trainer):
    """Each rank clips by the norm of its own gradients."""

    class Faulty(trainer):
        def _clip(self, parameters, max_norm, norm_type=2):
            return torch.nn.utils.clip_grad_norm_([*self.pipeline.parameters()], max_norm)

    return Faulty


def mean_of_means(trainer):
    """Each microbatch weighs the same, however many targets it has."""
    from zbpp.models.layers import token_loss
    from zbpp.transformers.batches import target_of
    from zbpp.transformers.losses import OwnLoss

    class Unweighted(OwnLoss):
        def __call__(self, logits, inputs):
            return token_loss(logits, target_of(inputs))

    class Faulty(trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._own_loss = Unweighted(self)

    return Faulty


def lost_microbatch(trainer):
    """The last microbatch of a step is not trained on."""

    class Faulty(trainer):
        def _arguments(self, microbatches, *others):
            return super()._arguments(microbatches[:-1] or microbatches, *others)

    return Faulty


def stale_copy(trainer):
    """The last rank's copy of the tied weight is not updated."""

    class Faulty(trainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            for group in optimizer.param_groups if dist.get_rank() else ():
                head = self.model.lm_head.weight
                group["params"] = [each for each in group["params"] if each is not head]
            return optimizer

    return Faulty


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [None, own_norm, mean_of_means, lost_microbatch])
def test_the_comparison_with_one_process_finds_a_fault(fault, tmp_path):
    case = TIED._replace(sizes={})  # copies of a tied weight would tell the first fault by themselves
    (expected,) = run_ranks(trained, 1, case._replace(schedule=""), str(tmp_path / "alone"))
    left, _ = run_ranks(trained, 2, case._replace(trainer=fault), str(tmp_path / "piped"))
    with nullcontext() if fault is None else pytest.raises(AssertionError):
        assert_same(left, expected, rel=1e-5, weights=1e-4)


@pytest.mark.nightly
def test_a_stale_copy_of_a_tied_weight_raises(tmp_path):
    for succeeded, text in outcomes(trained, 2, TIED._replace(trainer=stale_copy), str(tmp_path)):
        assert not succeeded
        assert "lm_head.weight of stage 1 are tied, and the copies differ" in text


def other_batches(trainer):
    """Rank 1 reads other tokens from the fifth step on, in batches of the same shapes."""

    class Other(trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            is_changed = dist.get_rank() and self.state.global_step >= 4  # zbpp compares the first three
            return {**inputs, "input_ids": inputs["input_ids"].flip(0)} if is_changed else inputs

    return Other


def test_different_batches_on_the_ranks_raise_on_all(tmp_path):
    found = outcomes(trained, 2, TIED._replace(trainer=other_batches), str(tmp_path))
    for succeeded, text in found:
        assert not succeeded
        assert "RuntimeError: the ranks of this pipeline were given different batches" in text


def saves_alone(trainer):
    if dist.get_rank() == 0:
        trainer.save_model("alone")


@pytest.mark.nightly
def test_a_rank_that_saves_alone_does_not_hang_past_the_timeout(tmp_path):
    case = TIED._replace(finish=saves_alone, options={"timeout": 5.0})
    found = outcomes(trained, 2, case, str(tmp_path))
    assert not any(succeeded for succeeded, _ in found)
    assert "all ranks must call save_model" in found[0][1]
