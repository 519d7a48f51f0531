"""fp16=True: all ranks have one scale and skip the same steps, as one process does.

On a CPU accelerate ignores fp16, so these tests give it autocast and a scaler, in one process, too.
"""

from functools import partial
from unittest import mock

import pytest
import torch

from helpers.hf_trainer import Case, assert_same, trained
from helpers.processes import outcomes, run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.nightly

TOO_LARGE, SMALL = 2.0**23, 2.0**10


def with_scaler(chosen, start):
    """A subclass with a scaler that begins with a scale; `scales` are those behind each step."""
    from accelerate import Accelerator

    class WithScaler(Accelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.native_amp = True
            self.scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=2)

    class Scaled(chosen):
        def create_accelerator_and_postprocess(self):
            with mock.patch("transformers.trainer.Accelerator", WithScaler):
                super().create_accelerator_and_postprocess()

        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                self.scales = [*getattr(self, "scales", []), self.accelerator.scaler.get_scale()]
            super().log(logs, *args, **kwargs)

    return Scaled


def scales(trainer):
    return trainer.scales


def case_of(start, **arguments):
    trainer = partial(with_scaler, start=start)
    return Case(arguments={"fp16": True, **arguments}, trainer=trainer, finish=scales)


OF_ADAM = 0.1  # it divides gradients by their size, also those that are float16's rounding


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [
        ({"optim": "sgd", "learning_rate": 0.1}, 3e-3),
        ({}, OF_ADAM),
        ({"optim": "adamw_torch", "max_grad_norm": 0.0, "label_smoothing_factor": 0.1}, OF_ADAM),
    ],
)
def test_all_ranks_skip_the_steps_that_one_process_skips(arguments, weights, tmp_path):
    """The fused AdamW skips by itself, so the rate goes on; otherwise the scheduler skips a step, too."""
    case = case_of(TOO_LARGE, **arguments)
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    both = run_ranks(trained, 2, case._replace(schedule="zb_v"), str(tmp_path / "piped"))
    assert_same(both[0], expected, rel=2e-3, weights=weights)
    assert expected.found == both[0].found == both[1].found
    rises = [later > earlier for earlier, later in zip(expected.found, expected.found[1:], strict=False)]
    assert expected.found[0] < TOO_LARGE
    assert any(rises)
    resumed = case._replace(resume=str(tmp_path / "piped/run/checkpoint-4"))
    (left,) = run_ranks(trained, 1, resumed, str(tmp_path / "resumed"))
    assert_same(left, expected, first=5, rel=2e-3, weights=weights)
    assert left.found == expected.found[4:]


def test_two_pipelines_skip_the_steps_that_two_data_parallel_processes_skip(tmp_path):
    case = case_of(TOO_LARGE, optim="sgd", learning_rate=0.1, num_train_epochs=4)
    expected, _ = run_ranks(trained, 2, case, str(tmp_path / "ddp"))
    case = case._replace(schedule="zb_h1", options={"replicas": 2})
    left = run_ranks(trained, 4, case, str(tmp_path / "piped"))
    assert_same(left[0], expected, rel=2e-3, weights=3e-3)
    assert all(each.found == expected.found for each in left)


def with_overflow(model):
    """The embedding, which the first rank has, gets an infinite gradient in the third step."""
    calls = []

    def grown(grad):
        calls.append(grad)
        return grad * torch.inf if len(calls) == 10 else grad

    model.model.embed_tokens.weight.register_hook(grown)
    return model


def with_own_overflows(chosen, start):
    """Each rank looks at its own gradients alone."""

    class Faulty(with_scaler(chosen, start)):
        def create_accelerator_and_postprocess(self):
            with mock.patch("zbpp.transformers.replicas._share_overflows"):
                super().create_accelerator_and_postprocess()

    return Faulty


def test_an_overflow_on_one_rank_is_one_on_all(tmp_path):
    case = case_of(SMALL, optim="adamw_torch")._replace(change=with_overflow)
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    both = run_ranks(trained, 2, case._replace(schedule="zb_h1"), str(tmp_path / "piped"))
    assert expected.found[:3] == [SMALL, 2 * SMALL, SMALL]
    assert both[0].found == both[1].found == expected.found
    assert_same(both[0], expected, rel=2e-3, weights=3e-3)


def test_ranks_that_scale_by_themselves_are_found(tmp_path):
    case = case_of(SMALL)._replace(
        schedule="zb_h1", change=with_overflow, trainer=partial(with_own_overflows, start=SMALL)
    )
    found = outcomes(trained, 2, case, str(tmp_path))
    assert not any(succeeded for succeeded, _ in found)
    assert "pipeline.loss_scale is 1024 on rank 0 and 2048 on rank 1" in "".join(text for _, text in found)
