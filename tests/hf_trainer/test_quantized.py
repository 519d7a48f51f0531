"""A base of 4 or 8 bits with adapters, in a pipeline, against the unmodified Trainer in one process."""

import pytest
import torch

from helpers.hf_sft import lora, sft
from helpers.hf_trainer import Case, assert_same, model_of, plain, trained
from helpers.processes import run_ranks
from zbpp import plan

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.nightly,
    # peft reads what transformers has renamed
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 128}
OF_4_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
QUANTIZED = {
    "nf4": {**OF_4_BITS, "bnb_4bit_quant_type": "nf4"},
    "fp4": {**OF_4_BITS, "bnb_4bit_quant_type": "fp4"},
    "nf4 twice": {**OF_4_BITS, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def quantization(kind):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**QUANTIZED[kind])


def whole(folder, config):
    """A model whose layers are quantized, given to the trainer."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="float32")


def sft_of_whole(case, folder):
    arguments = dict(case.arguments)
    model = whole(arguments.pop("folder"), quantization(arguments.pop("quantized")))
    return sft(case._replace(arguments={**arguments, "model": model}), folder)


def with_float32_adapters(chosen):
    """A subclass whose adapters are float32, and whose quantized weights stay as they are in evaluations.

    TRL holds the adapters of a quantized base in bfloat16, which would hide small errors. In one process
    bitsandbytes packs weights anew in the first evaluation, on a CPU with bfloat16, and rounds statistics.
    """

    class Float32Adapters(chosen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for each in self.model.parameters():
                if each.requires_grad:
                    each.data = each.data.float()
            for each in self.model.modules():
                if hasattr(each, "support_avx512bf16_for_cpu"):
                    each.support_avx512bf16_for_cpu = False

    return Float32Adapters


def linear_bytes(trainer):
    """The bytes of this rank's quantized weights and of their statistics, and of all weights."""
    import bitsandbytes

    kinds = bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt
    layers = [each for each in trainer.model.modules() if isinstance(each, kinds)]
    own = [each.weight.nbytes for each in layers if not each.weight.is_meta]
    return sum(own) + sum(map(statistics_bytes, layers)), sum(each.weight.nbytes for each in layers)


def statistics_bytes(layer):
    state = getattr(layer, "quant_state", None) or getattr(layer.weight, "quant_state", None)
    if state is None:  # of 8 bits, where the layer has it before its first forward, and its state afterwards
        found = [layer.weight.SCB, layer.state.SCB] if hasattr(layer.weight, "SCB") else []
        return max((each.nbytes for each in found if each is not None), default=0)
    return sum(each.absmax.nbytes for each in (state, state.state2) if each is not None)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("kind", "schedule", "num_ranks"),
    [
        ("nf4", "zb_v", 2),
        ("nf4", "zb_h1", 2),
        ("nf4", "zb_v", 4),
        ("nf4 twice", "zb_h1", 2),
        ("fp4", "zb_v", 2),
        ("int8", "zb_v", 2),
    ],
)
def test_a_quantized_base_trains_as_in_one_process(kind, schedule, num_ranks, is_whole, tmp_path):
    """From a folder each rank reads and quantizes its own tensors; a model that is given whole is cut."""
    pytest.importorskip("trl")
    base = str(tmp_path / "base")
    model_of(Case(sizes={**SIZES, "num_hidden_layers": 2 * num_ranks})).save_pretrained(base)
    arguments = {"peft_config": lora(target_modules="all-linear")}
    if is_whole:
        arguments |= {"folder": base, "quantized": kind}
    else:
        options = {"quantization_config": quantization(kind), "dtype": "float32"}
        arguments |= {"model": base, "model_init_kwargs": options}
    kit = sft_of_whole if is_whole else sft
    case = Case(arguments=arguments, kit=kit, trainer=with_float32_adapters, finish=linear_bytes)
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    left = run_ranks(trained, num_ranks, case._replace(schedule=schedule), str(tmp_path / "piped"))
    assert_same(left[0], expected, weights=1e-4)
    assert expected.found[0] == sum(each.found[0] for each in left) > expected.found[1]
    assert all(each.found[0] == expected.found[0] // num_ranks for each in left)


def test_adapters_of_a_quantized_base_go_on(tmp_path):
    """In one process, and under another schedule with more ranks."""
    pytest.importorskip("trl")
    base = str(tmp_path / "base")
    model_of(Case(sizes={**SIZES, "num_hidden_layers": 8})).save_pretrained(base)
    options = {"quantization_config": quantization("nf4"), "dtype": "float32"}
    arguments = {"peft_config": lora(), "model": base, "model_init_kwargs": options}
    case = Case(arguments=arguments, kit=sft, trainer=with_float32_adapters)
    run_ranks(trained, 1, case, str(tmp_path / "alone"))
    run_ranks(trained, 2, case._replace(schedule="zb_h1"), str(tmp_path / "piped"))
    left = []
    for name, schedule, num_ranks in (("alone", "", 1), ("piped", "", 1), ("piped", "zb_v", 4)):
        resumed = case._replace(schedule=schedule, resume=str(tmp_path / name / "run/checkpoint-4"))
        left += run_ranks(trained, num_ranks, resumed, f"{tmp_path}/{name}{num_ranks}")[:1]
    for each in left[1:]:
        assert_same(each, left[0], first=5, weights=1e-4)


def plain_of_whole(case, folder):
    """The Trainer of transformers, with a base of 4 bits and adapters."""
    import peft

    chosen, given = plain(case._replace(arguments={}), folder)
    torch.manual_seed(2)
    model = peft.get_peft_model(whole(case.arguments["folder"], quantization("nf4")), lora())
    return chosen, {**given, "model": model}


def sliced(num_ranks, num_microbatches):
    return plan("zb_v", num_ranks, num_microbatches, num_slices=2)


def test_sequences_in_slices(tmp_path):
    base = str(tmp_path / "base")
    model_of(Case(sizes=SIZES)).save_pretrained(base)
    case = Case(arguments={"folder": base}, kit=plain_of_whole, trainer=with_float32_adapters)
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    case = case._replace(schedule=sliced, options={"slice_bounds": [0, 6, 12]})
    assert_same(run_ranks(trained, 2, case, str(tmp_path / "piped"))[0], expected, weights=1e-4)


def test_two_pipelines_are_two_data_parallel_processes(tmp_path):
    base = str(tmp_path / "base")
    model_of(Case(sizes=SIZES)).save_pretrained(base)
    case = Case(arguments={"folder": base}, kit=plain_of_whole, trainer=with_float32_adapters)
    expected, _ = run_ranks(trained, 2, case, str(tmp_path / "ddp"))
    case = case._replace(schedule="zb_h1", options={"replicas": 2})
    assert_same(run_ranks(trained, 4, case, str(tmp_path / "piped"))[0], expected, weights=1e-4)
