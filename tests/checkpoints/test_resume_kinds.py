"""Whatever a run has, it goes on from a checkpoint to the last bit: losses, rates, weights, buffers."""

import importlib.util

import pytest
import torch
from torch import nn

from zbpp import ActivationOffload, Costs, Pipeline, plan
from zbpp.config import OptimizerConfig
from zbpp.data import regression_data
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.run.optimizer import build_scheduler, learning_rate_factor, optimizer_of
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.leaving import StopAfter
from zbpp.training.replan import Replan
from zbpp.training.trainer import Trainer

STEPS, WIDTH, M = 10, 6, 4


class Noisy:
    """Layers with dropout, BatchNorm whose statistics are buffers, and a last layer tied to the first."""

    def __init__(self, *, is_tied=False):
        self.is_tied = is_tied

    def build_stage(self, index, num_stages):
        stage = nn.Sequential()
        for number in range(8 * index // num_stages, 8 * (index + 1) // num_stages):
            torch.manual_seed(number)
            layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())
            if number % 3 == 1:
                layer.append(nn.BatchNorm1d(WIDTH))
            stage.add_module(f"layer_{number}", layer)
        return stage

    def tied(self):
        return {"layer_7.0.weight": "layer_0.0.weight"} if self.is_tied else {}

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)


def adamw(**options):
    return OptimizerConfig(name="adamw", learning_rate=0.01, warmup_steps=3, **options)


CUSTOM = OptimizerConfig(
    name="custom",
    build={"_target_": "torch.optim.NAdam", "lr": 0.01},
    groups=[{"match": "*.bias", "weight_decay": 0.1}, {"match": "layer_[45]*", "lr": 0.002}],
    lr_scheduler={"_target_": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "T_0": 3},
    warmup_steps=3,
)
LORA = {"r": 2, "lora_dropout": 0.2, "target_modules": ["0"]}
BEFORE, AFTER = 3, 7  # steps of a run that is replanned behind its fourth
VARIANTS = {
    "tied": {"model": {"is_tied": True}, "clip_norm": 0.3},
    "LoRA": {"lora": LORA, "clip_norm": 0.3},
    "LoRA, post-validation": {"lora": LORA, "clip_norm": 0.3, "post_validation": True},
    "gradients released": {"gradient_release": True},
    "activations offloaded": {"offload": ActivationOffload(Costs(host=1e-6), least_bytes=1)},
    "weights offloaded": {"offload_weights": True},
    "optimizer and scheduler by name, groups": {"optimizer": CUSTOM, "clip_norm": 0.3},
    "Muon, groups, gradients released": {
        "optimizer": OptimizerConfig(
            name="muon", learning_rate=0.01, warmup_steps=3, groups=[{"match": "layer_7*", "lr": 0.1}]
        ),
        "gradient_release": True,
    },
    "left before it is replanned": {"left": BEFORE, "replanned": True},
    "left after it was replanned": {"left": AFTER, "replanned": True},
    "replanned, post-validation": {
        "left": AFTER, "replanned": True, "clip_norm": 0.3, "post_validation": True
    },
    "replanned, released": {"left": AFTER, "replanned": True, "gradient_release": True},
}  # fmt: skip


def trainer_of(
    callbacks=(),
    *,
    model=None,
    lora=None,
    optimizer=None,
    offload=None,
    offload_weights=False,
    replanned=False,
    left=None,
    **options,
):
    made = Noisy(**(model or {}))
    made = made if lora is None else FineTuned(made, lora=lora)
    timetable = plan("zb_v", 1, M)
    stages = {index: made.build_stage(index, timetable.num_stages) for index in range(timetable.num_stages)}
    if offload_weights:
        OffloadedWeights(stages, torch.device("cpu"))
    pipeline = Pipeline(made if model else stages, timetable, made.loss, extras=[*filter(None, [offload])])
    config = optimizer or adamw()
    built = optimizer_of(pipeline, config, None, options.get("gradient_release", False))
    other = plan("interleaved_1f1b", 1, M, stages_per_rank=2) if replanned else None
    return Trainer(
        pipeline=pipeline,
        optimizer=built,
        data=regression_data(in_features=WIDTH, out_features=WIDTH, batch_size=4 * M, seed=0),
        learning_rate=learning_rate_factor(config, STEPS),
        scheduler=build_scheduler(built, config),
        num_recorded=0,
        replan=Replan(plan=lambda costs, limits: other, loss_fn=made.loss, stages=stages)
        if replanned
        else None,
        callbacks=callbacks,
        **options,
    )


def trained(trainer):
    """({step: loss, norm and rate}, weights and buffers, the last plan)."""
    rows = [
        (each["step"], each["loss"], each["grad_norm"], each["learning_rate"]) for each in trainer.run(STEPS)
    ]
    pipeline = trainer.pipeline
    weights = {
        f"{index}.{name}": each.clone()
        for index in pipeline.stages
        for name, each in pipeline.state_dict(index).items()
    }
    pipeline.close()
    return rows, weights, str(pipeline.timetable)


AT_NIGHT = {"LoRA", "gradients released", "left before it is replanned", "replanned, released"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in VARIANTS]
)
def test_a_run_goes_on_to_the_last_bit(name, tmp_path):
    options = VARIANTS[name]
    if "lora" in options and importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft")
    first, again = (
        Checkpoints(tmp_path, every=2, keep=2, background=True, config={"seed": 0}) for _ in range(2)
    )
    rows, weights, timetable = trained(trainer_of(**options))
    begun, left, _ = trained(trainer_of([first, StopAfter(options.get("left", 5))], **options))
    trainer = trainer_of([again], **options)
    again.resume(trainer, tmp_path, STEPS)
    ended, found, last = trained(trainer)
    assert begun + ended == rows
    assert len(begun) == options.get("left", 5)
    assert found.keys() == weights.keys()
    for key, each in weights.items():
        assert torch.equal(found[key], each), key
    assert any(not torch.equal(left[key], each) for key, each in weights.items())
    assert last == timetable
