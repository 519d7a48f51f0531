"""Stages on fake tensors take the bytes that they take on real ones."""

from dataclasses import replace
from unittest.mock import patch

import pytest

pytest.importorskip("transformers")

from helpers.configs import composed
from helpers.hf_folders import saved
from models.test_hf import CONFIGS, config_of
from zbpp.prediction.predictor import Predictor
from zbpp.prediction.stage_memory import FAKE, REAL, measure_stages
from zbpp.run.plan import build_timetable

OVERRIDES = ["schedule=zb_h1", "model=huggingface", "num_microbatches=2", "microbatch_size=1"]
BY_DAY = ("gpt2", "deepseek_v3")  # a model that reads its tokens; experts
ROUNDING = 1000  # bytes: a scalar more or less, while one action runs


def measured_twice(config, timetable):
    """On fake tensors, and on real ones."""
    fake = measure_stages(config, timetable)
    assert fake.how == FAKE
    with patch("zbpp.prediction.stage_memory.FakeTensors.__enter__", side_effect=RuntimeError("none here")):
        real = measure_stages(config, timetable)
    assert real.how.startswith(REAL)
    return fake, real


@pytest.mark.parametrize(
    "kind", [kind if kind in BY_DAY else pytest.param(kind, marks=pytest.mark.nightly) for kind in CONFIGS]
)
def test_a_hugging_face_model_runs_on_fake_tensors_and_takes_what_real_ones_take(kind):
    config = composed(*OVERRIDES)
    config.model["config"] = {**config_of(kind), "vocab_size": 256}
    timetable = build_timetable(config.schedule, 2, config.num_microbatches)
    fake, real = measured_twice(config, timetable)
    for one, other in zip(fake.stages, real.stages, strict=True):
        assert replace(one, rises=()) == replace(other, rises=())
        assert one.rises == pytest.approx(other.rises, abs=ROUNDING)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        ["model.quantize=nf4", "finetune.lora.target_modules=all-linear", "finetune.lora.use_dora=true",
         "finetune.lora.modules_to_save=[lm_head]"],
        ["finetune.lora.use_dora=true"], ["finetune.lora.modules_to_save=[embed_tokens,norm]"],
        ["finetune.lora.bias=all"], ["finetune.lora.bias=lora_only"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_adapters_run_on_fake_tensors_and_take_what_real_ones_take(given, tmp_path):
    for name in ("peft", "bitsandbytes"):
        pytest.importorskip(name)
    saved("llama", tmp_path, attention_bias=True, vocab_size=256, max_position_embeddings=256)
    adapters = ["finetune.lora.r=2", "finetune.lora.target_modules=[q_proj,down_proj]"]
    config = composed(*OVERRIDES, f"model.path={tmp_path}", *adapters, *given)
    timetable = build_timetable(config.schedule, 2, config.num_microbatches)
    fake, real = measured_twice(config, timetable)
    for one, other in zip(fake.stages, real.stages, strict=True):
        # the real weights don't show bitsandbytes's statistics, which are no buffers
        assert 0 <= one.weights - other.weights <= 1000
        assert replace(one, rises=(), weights=0) == replace(other, rises=(), weights=0)
        assert one.rises == pytest.approx(other.rises, abs=ROUNDING)


def test_stages_that_were_measured_before_go_with_new_ones_on_fake_tensors():
    """The outputs of a stage measured for another switch had another mode: the next one ran on the CPU."""
    given = ["schedule=zb_h1", "model=llama_tiny", "model.num_layers=4", "num_microbatches=4"]
    predictor = Predictor()
    for more in ([], ["memory.head_at_once=true"], ["memory.recompute=block"]):
        found = predictor.predict(composed(*given, "parallel.num_processes=4", *more))
        assert found.how == FAKE


def test_a_stage_that_converts_its_modules_runs_on_fake_tensors():
    """peft's layers do, by Module.to. torch refuses this in its own mode, so LoRA stages ran on the CPU."""
    given = ["schedule=zb_h1", "model=llama_tiny", "model.num_layers=2", "num_microbatches=2"]
    given += ["finetune.lora.r=2", "finetune.lora.target_modules=[query]", "finetune.lora.use_dora=true"]
    found = Predictor().predict(composed(*given, "finetune.lora.modules_to_save=[embedding]"))
    assert found.how == FAKE
