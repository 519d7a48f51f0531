"""TRL's SFTTrainer in a pipeline, against the unmodified one in one process. Skipped without trl."""

import os

import pytest
import torch

from helpers.hf_sft import chats, lora, sft, tokenizer
from helpers.hf_trainer import ARGUMENTS, Case, assert_same, model_of, trained
from helpers.processes import run_ranks

pytest.importorskip("trl")
pytest.importorskip("peft")

pytestmark = [
    pytest.mark.nightly,
    # peft reads what transformers has renamed
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def preferences(count, first):
    """Questions, each with an answer and a worse one."""
    from datasets import Dataset

    rows = {"prompt": [], "chosen": [], "rejected": []}
    for messages in chats(count, first)["messages"]:
        question, answer = (each["content"] for each in messages)
        rows["prompt"].append(question + " ")
        rows["chosen"].append(answer)
        rows["rejected"].append(" ".join(answer.split()[::-2]))
    return Dataset.from_dict(rows)


def dpo(case, folder):
    """DPOTrainer, whose reference figures are columns of the data that lie in the folder."""
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer

    given = {**ARGUMENTS, "gradient_checkpointing": False, "precompute_ref_log_probs": True, **case.arguments}
    more = {"peft_config": given.pop("peft_config")} if "peft_config" in given else {}
    datasets = {f"{name}_dataset": load_from_disk(f"{folder}/{name}") for name in ("train", "eval")}
    args = DPOConfig(output_dir=f"{folder}/run", **given)
    return DPOTrainer, {
        "model": model_of(case),
        "args": args,
        "processing_class": tokenizer(),
        **datasets,
        **more,
    }


PREFERENCES = {
    "sigmoid": {},
    "ipo": {"loss_type": ["ipo"]},
    "several": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "lora": {"peft_config": {}},
}
REWARDS = ("rewards/chosen", "rewards/margins", "logps/rejected", "logits/chosen", "eval_rewards/margins")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_as_in_as_many_processes(name, replicas, tmp_path):
    arguments = dict(PREFERENCES[name])
    if "peft_config" in arguments:
        arguments["peft_config"] = lora()
    for side in ("alone", "piped"):
        preferences(25, 0).save_to_disk(tmp_path / side / "train")
        preferences(12, 40).save_to_disk(tmp_path / side / "eval")
    case = Case(arguments=arguments, kit=dpo)
    expected, *_ = run_ranks(trained, replicas, case, str(tmp_path / "alone"))
    case = case._replace(schedule="zb_v", options={"replicas": replicas})
    left = run_ranks(trained, 2 * replicas, case, str(tmp_path / "piped"))
    assert_same(left[0], expected, rel=1e-5, weights=1e-4)
    for key in REWARDS:
        for one in left:
            values = [[each[key] for each in logs if key in each] for logs in (one.logs, expected.logs)]
            assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), key
        assert values[1]


CASES = {
    "packed": ({"packing": True, "max_length": 24}, {}),
    "all tokens": ({}, {}),
    "smoothing": ({"label_smoothing_factor": 0.1}, {}),
    "lora": ({"assistant_only_loss": True, "peft_config": {}}, {"weights": 1e-4}),
    "dora": ({"peft_config": {"target_modules": "all-linear", "use_dora": True}}, {"weights": 1e-4}),
    # peft saves the weight of an embedding that has adapters
    "lora on embeddings": (
        {"peft_config": {"target_modules": ["q_proj", "embed_tokens"]}},
        {"weights": 1e-4},
    ),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "bf16": ({"bf16": True}, {"rel": 5e-2, "weights": 3e-2}),
    "dft": ({"loss_type": "dft"}, {}),
}


ANSWERS = {"assistant_only_loss": True}


def compared(arguments, tolerances, tmp_path, schedule="zb_v", num_ranks=2):
    arguments = dict(arguments)
    if "peft_config" in arguments:
        arguments["peft_config"] = lora(**arguments["peft_config"])
    case = Case(arguments=arguments, kit=sft, sizes={"num_hidden_layers": 2 * num_ranks})
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    left = run_ranks(trained, num_ranks, case._replace(schedule=schedule), str(tmp_path / "piped"))
    assert_same(left[0], expected, **tolerances)
    return left


def test_answers_alone_are_trained_on_as_in_one_process(tmp_path):
    both = compared(ANSWERS, {}, tmp_path)
    assert {"mean_token_accuracy", "entropy", "num_tokens"} <= both[1].logs[0].keys()  # on every rank


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_as_in_one_process(name, tmp_path):
    compared(*CASES[name], tmp_path, "zb_h1")


@pytest.mark.parametrize("name", ["packed", "lora", "dora"])
def test_four_processes_are_as_one(name, tmp_path):
    compared(*CASES[name], tmp_path, "zb_v", 4)


@pytest.mark.parametrize("arguments", [{}, ANSWERS, CASES["packed"][0]], ids=["all", "answers", "packed"])
def test_two_pipelines_are_two_data_parallel_processes(arguments, tmp_path):
    """Batches of an evaluation have unequal numbers of targets, and each process takes its own mean."""
    case = Case(kit=sft, arguments=arguments)
    expected, _ = run_ranks(trained, 2, case, str(tmp_path / "ddp"))
    case = case._replace(schedule="zb_v", options={"replicas": 2})
    assert_same(run_ranks(trained, 4, case, str(tmp_path / "piped"))[0], expected)


MIXTRAL = Case(kind="mixtral", sizes={"num_local_experts": 4, "num_experts_per_tok": 2}, kit=sft)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_experts_are_as_in_one_process_without_a_loss_of_their_routers(tmp_path):
    """TRL asks for that loss by itself, which no stage has."""
    from zbpp.transformers import in_pipeline

    chosen, given = sft(MIXTRAL, tmp_path)
    with pytest.raises(ValueError, match="^output_router_logits [^\n]*router_aux_loss_coef=0.0 in the arg"):
        in_pipeline(chosen)(**given)
    case = MIXTRAL._replace(arguments={"router_aux_loss_coef": 0.0})
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    both = run_ranks(trained, 2, case._replace(schedule="zb_v"), str(tmp_path / "piped"))
    assert_same(both[0], expected)


def held(trainer):
    """The numbers of this rank's parameters, and of all."""
    own = sum(each.numel() for each in trainer.model.parameters() if not each.is_meta)
    return own, sum(each.numel() for each in trainer.model.parameters())


@pytest.mark.parametrize(
    ("tied", "schedule", "num_ranks"), [(False, "zb_h1", 2), (True, "zb_h1", 2), (True, "zb_v", 4)]
)
def test_each_rank_reads_its_own_tensors_of_a_folder(tied, schedule, num_ranks, tmp_path):
    sizes = {"tie_word_embeddings": tied, "num_hidden_layers": 2 * num_ranks}
    model_of(Case(sizes=sizes)).save_pretrained(tmp_path / "base")
    case = Case(arguments={"model": str(tmp_path / "base")}, kit=sft, finish=held)
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    left = run_ranks(trained, num_ranks, case._replace(schedule=schedule), str(tmp_path / "piped"))
    assert_same(left[0], expected)
    own, of_all = [each.found[0] for each in left], left[0].found[1]
    copy = 40 * 32 if tied and schedule == "zb_h1" else 0  # the last rank has a copy of the tied weight
    assert sum(own) == of_all + copy
    assert max(own) < 1.2 / num_ranks * of_all


def test_an_adapter_goes_on_everywhere_and_loads_in_peft(tmp_path):
    from peft import PeftModel

    arguments = {"peft_config": lora()}
    case = Case(arguments=arguments, kit=sft)
    run_ranks(trained, 1, case, str(tmp_path / "alone"))
    run_ranks(trained, 2, case._replace(schedule="zb_v"), str(tmp_path / "piped"))
    left = []
    for name, schedule in (("alone", ""), ("alone", "zb_h1"), ("piped", ""), ("piped", "zb_h1")):
        resumed = case._replace(schedule=schedule, resume=str(tmp_path / name / "run/checkpoint-4"))
        left += run_ranks(trained, 2 if schedule else 1, resumed, str(tmp_path / f"{name}{schedule}"))[:1]
    for each in left[1:]:
        assert_same(each, left[0], first=5, weights=1e-4)
    checkpoint = tmp_path / "piped/run/checkpoint-4"
    assert os.path.exists(checkpoint / "adapter_config.json")
    loaded = PeftModel.from_pretrained(model_of(Case()), tmp_path / "piped/final")
    found = {name: each for name, each in loaded.named_parameters() if "lora_B" in name}
    assert len(found) == 8
    assert all(bool(torch.count_nonzero(each)) for each in found.values())
