"""layers_per_stage="auto": each rank times a block, and the slow one gets fewer layers."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers.hf_trainer import Case, assert_same, model_of, plain, trained
from helpers.processes import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.nightly


def lora(model):
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=["q_proj"])
    return peft.get_peft_model(model, config)


def of_folder(case, folder):
    """A Trainer whose model is a folder; in one process the model that the library reads there."""
    import transformers

    chosen, given = plain(case, folder)
    base = str(Path(folder).parent / "base")
    model = base if case.schedule else transformers.AutoModelForCausalLM.from_pretrained(base)
    return chosen, {**given, "model": model}


def of_four_bits(case, folder):
    """A Trainer whose base is quantized before it is given to the Trainer, with adapters."""
    import transformers

    chosen, given = plain(case, folder)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(folder).parent / "base", quantization_config=config, dtype="float32"
    )
    for each in model.modules():  # in one process the library would round statistics in evaluations
        if hasattr(each, "support_avx512bf16_for_cpu"):
            each.support_avx512bf16_for_cpu = False
    return chosen, {**given, "model": lora(model)}


def with_slow_first_rank(trainer):
    """The layers of rank 0 take 20 ms more, where they are timed and where they train."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def slow(self, *args, **kwargs):
        time.sleep(0.02)
        return forward(self, *args, **kwargs)

    class Slow(trainer):
        def __init__(self, **given):
            with slowed():
                super().__init__(**given)
                self.pipeline  # noqa: B018  # the model is cut

    def slowed():
        return mock.patch.object(LlamaDecoderLayer, "forward", slow if dist.get_rank() == 0 else forward)

    return Slow


def layers(trainer):
    return list(trainer._cut.layers)


@pytest.mark.parametrize("given", [{}, {"change": lora}, {"kit": of_folder}, {"kit": of_four_bits}])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_the_slow_rank_gets_fewer_layers_and_losses_are_those_of_one_process(given, tmp_path):
    if "kit" in given:
        pytest.importorskip("bitsandbytes")
    case = Case(sizes={"num_hidden_layers": 6}, **given)
    model_of(case._replace(change=None)).save_pretrained(tmp_path / "base")
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    case = case._replace(
        schedule="1f1b",
        options={"layers_per_stage": "auto"},
        trainer=with_slow_first_rank,
        finish=layers,
    )
    both = run_ranks(trained, 2, case, str(tmp_path / "piped"))
    first, last = both[0].found
    assert both[0].found == both[1].found
    assert first + last == 6
    assert first <= 2
    assert_same(both[0], expected, weights=1e-4)
