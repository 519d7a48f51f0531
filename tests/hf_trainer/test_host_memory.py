"""A rank that reads its own tensors of a folder never has the whole model in memory."""

import ctypes
import sys
from pathlib import Path

import pytest

from helpers.hf_sft import lora, sft
from helpers.hf_trainer import Case, model_of, trained
from helpers.processes import run_ranks

pytest.importorskip("trl")
pytest.importorskip("peft")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MIB = 2**20
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
WHOLE = 192  # MiB of such a model in float32
REST = 64  # MiB of all else: imports, data, activations
ARGUMENTS = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 2, "optim": "sgd"}


def resident(name):
    """VmRSS, or its peak, VmHWM, of this process in MiB."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) / 1024


def measured(chosen):
    """A subclass that measures what its process grows by until the model is there, and cut."""

    class Measured(chosen):
        def __init__(self, **given):
            mmap_threshold = -3  # a freed tensor goes back to the system at once
            ctypes.CDLL(None).mallopt(mmap_threshold, 65536)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.before = resident("VmRSS")
            super().__init__(**given)
            getattr(self, "pipeline", None)  # cuts the model
            self.made = resident("VmHWM") - self.before

    return Measured


def memory(trainer):
    """(weights, growth until the model is cut, growth until the end of the training), in MiB."""
    own = sum(each.nbytes for each in trainer.model.parameters() if not each.is_meta) / MIB
    return own, trainer.made, resident("VmHWM") - trainer.before


def found(case, num_ranks, folder):
    model_of(Case(sizes=SIZES)).save_pretrained(folder / "base")
    case = case._replace(
        arguments={**ARGUMENTS, **case.arguments, "model": str(folder / "base")},
        kit=sft,
        trainer=measured,
        finish=memory,
    )
    return [each.found for each in run_ranks(trained, num_ranks, case, str(folder), fresh=True)]


def test_one_process_has_the_whole_model(tmp_path):
    """So the measure sees it."""
    ((own, _, trained_in),) = found(Case(), 1, tmp_path)
    assert own == pytest.approx(WHOLE, rel=0.01)
    assert trained_in > 2 * WHOLE  # with gradients


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("zb_v", 4)])
def test_a_rank_has_its_part_alone(schedule, num_ranks, tmp_path):
    for own, made, trained_in in found(Case(schedule=schedule), num_ranks, tmp_path):
        assert own == pytest.approx(WHOLE / num_ranks, rel=0.01)
        assert own < made < own + REST
        assert 2 * own < trained_in < 2 * own + 1.5 * REST


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("zb_v", 4)])
def test_a_rank_has_its_part_in_4_bits_alone(schedule, num_ranks, tmp_path):
    """Each tensor is quantized when it is read: not even the rank's own stages are there in float32."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32"
    )
    options = {"quantization_config": config, "dtype": "float32"}
    arguments = {"peft_config": lora(), "model_init_kwargs": options}
    for own, made, _ in found(Case(arguments=arguments, schedule=schedule), num_ranks, tmp_path):
        assert own < WHOLE / num_ranks / 7
        assert own < made < own + REST
