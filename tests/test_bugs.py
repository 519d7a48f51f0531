"""One test per bug that was found, named after the symptom. Each was red before its fix."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from helpers.processes import outcomes
from helpers.trainers import small_trainer
from zbpp import Pipeline, backward_input, checkpoint, plan
from zbpp.autograd.compiled import compile_stage
from zbpp.config import ConfigError
from zbpp.measure import measured_costs
from zbpp.models.mlp import Mlp
from zbpp.run.model import build_model
from zbpp.training.optim.optimizer import adamw


def test_a_run_of_one_step_with_evaluation_ended_in_a_zip_error():
    """Evaluation wrote its F's over what the step had recorded: the timeline was shorter than its row."""
    trainer = small_trainer("zb_h1", evaluate_every=1)
    (metrics,) = trainer.run(1)
    assert "evaluation_loss" in metrics
    (timeline,) = trainer.timelines.values()
    assert len(timeline.starts[0]) == len(timeline.timetable.rows[0])
    assert measured_costs(timeline).w[0] > 0


def test_a_stage_that_starts_in_place_was_refused_as_a_view_of_a_leaf():
    """`a view of a leaf Variable that requires grad is being used in an in-place operation`."""
    first, second = nn.Linear(4, 4).double(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4).double())
    x, target = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    F.mse_loss(second(first(x)), target).backward()
    expected = first.weight.grad.clone()
    first.zero_grad()
    Pipeline({0: first, 1: second}, plan("zb_v", 1, 2), F.mse_loss).step(x, target=target)
    torch.testing.assert_close(first.weight.grad, expected, rtol=1e-12, atol=1e-14)


def test_a_rank_whose_stages_are_all_frozen_had_no_optimizer():
    """`optimizer got an empty parameter list`."""
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer = adamw(frozen.parameters(), learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    before = frozen.weight.clone()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(frozen.weight, before)


class WithTrainedLoss(Mlp):
    """The loss is a module, with a parameter of its own."""

    def __init__(self, is_trained=True):
        super().__init__(in_features=2, hidden_size=2, out_features=2, num_layers=2)
        self.loss = nn.Bilinear(2, 2, 1).requires_grad_(is_trained)


def test_a_loss_with_trainable_parameters_was_left_untrained_by_the_trainer():
    """Its parameters were in no optimizer, stayed on the CPU and were in no file of weights."""
    node = {"_target_": f"{__name__}.WithTrainedLoss"}
    with pytest.raises(
        ConfigError, match=r"loss is a Bilinear with trainable parameters \(weight, bias\).*last stage"
    ):
        build_model(node)
    assert build_model({**node, "is_trained": False})


def build_with_a_wrong_stage_on_rank_1(rank):
    stage = nn.Linear(2, 2)
    Pipeline({0: stage}, plan("1f1b", 2, 2), F.mse_loss)


def test_a_wrong_stage_on_one_rank_left_the_others_waiting_for_their_timeout():
    for succeeded, text in outcomes(build_with_a_wrong_stage_on_rank_1, 2):
        assert not succeeded
        assert text.rstrip().endswith("rank 1 owns stages [1] of this timetable, got modules for [0]")


class FailsLater(nn.Module):
    """Raises in its second forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("planted")
        return x


def test_a_modules_own_error_was_blamed_on_the_boundary_to_the_stage_before():
    """Also running out of memory; only the first microbatch can show that shapes don't fit."""
    stages = {0: nn.Linear(4, 4), 1: FailsLater()}
    with pytest.raises(RuntimeError) as caught:
        Pipeline(stages, plan("zb_v", 1, 2), F.mse_loss).step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert (type(caught.value), str(caught.value)) == (RuntimeError, "planted")


def test_compiling_a_stage_that_runs_one_layer_twice_left_tracers_in_its_weights():
    """`Attempting to use FunctionalTensor on its own`, in the compiled stage and in the plain module."""
    layer = nn.Linear(4, 4).double()
    stage, x = nn.Sequential(layer, nn.GELU(), layer), torch.randn(2, 4).double()
    expected = torch.autograd.grad(stage(x).sum(), layer.parameters())
    compile_stage(stage, backend="eager")
    _, weight_grads = backward_input(stage(x).sum(), None, [x])
    weight_grads.accumulate()
    torch.testing.assert_close([p.grad for p in layer.parameters()], [*expected], rtol=1e-12, atol=1e-14)


def test_a_compiled_stage_without_anything_to_train_ended_in_a_zip_error():
    """A frozen first stage: `zip() argument 2 is shorter than argument 1`."""
    frozen, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    F.mse_loss(head(frozen(x)), target).backward()
    expected = head.weight.grad.clone()
    head.zero_grad()
    stages = {0: nn.Sequential(frozen), 1: head}
    compile_stage(stages[0], backend="eager")
    Pipeline(stages, plan("zb_v", 1, 1), F.mse_loss).step(x, target=target)
    torch.testing.assert_close(head.weight.grad, expected)


def test_a_reentrant_checkpoint_in_a_recomputed_block_ended_in_advice_that_did_not_fit():
    """`incompatible with .grad() or passing an `inputs` parameter`: the user had written neither."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = checkpoint(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True), x)
    with pytest.raises(RuntimeError, match="in a block that zbpp.checkpoint or recompute computes again"):
        backward_input(y.sum(), None, [x])
