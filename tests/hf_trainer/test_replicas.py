"""Two pipelines beside each other, against the unmodified Trainer in two data-parallel processes."""

import multiprocessing

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.hf_trainer import Case, assert_same, trained
from helpers.processes import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TIED = Case(sizes={"tie_word_embeddings": True})
TWO = {"replicas": 2}


def test_two_pipelines_are_two_data_parallel_processes(tmp_path):
    """25 rows and 12: the last batches of training and evaluation are filled up."""
    expected, _ = run_ranks(trained, 2, TIED, str(tmp_path / "ddp"))
    assert len([each for each in expected.logs if "loss" in each]) == 4  # of 8 in one process
    left = run_ranks(trained, 4, TIED._replace(schedule="zb_h1", options=TWO), str(tmp_path / "piped"))
    assert_same(left[0], expected)


def unseeded_lora(model):
    """Each replica draws adapters of its own; the first one's count, as DistributedDataParallel has it."""
    import peft

    torch.manual_seed(5 + dist.get_rank() % 2)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]
    )
    return peft.get_peft_model(model, config)


def allows_children(model):
    """Processes of the tests' pool are daemons, which may have none."""
    multiprocessing.current_process()._config["daemon"] = False
    return model


def means(outputs, labels, num_items_in_batch=None):
    """Cross-entropy and a term of the logits, over the items of a step."""
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
    return (total + 1e-2 * (logits.logsumexp(-1).square() * (target != -100)).sum()) / num_items_in_batch


def accuracy(found):
    tokens, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((tokens == labels)[labels != -100].mean())}


def chosen(logits, labels):
    return logits.argmax(-1)


def predicted(trainer):
    """The shape and the sum of what predict returns."""
    found = trainer.predict(trainer.eval_dataset)
    total = int(np.asarray(found.predictions, dtype=np.int64).sum())
    return [*found.predictions.shape, total, found.metrics["test_accuracy"], found.metrics["test_loss"]]


CASES = {
    "lora": (Case(change=unseeded_lora), {"weights": 1e-4}),
    "label smoothing": (Case(arguments={"label_smoothing_factor": 0.1}), {}),
    "compute_loss_func": (Case(more={"compute_loss_func": means}), {}),
    "compute_metrics": (
        Case(more={"compute_metrics": accuracy, "preprocess_logits_for_metrics": chosen}, finish=predicted),
        {},
    ),
    "workers": (
        Case(
            arguments={"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
            change=allows_children,
        ),
        {},
    ),
    "grouped by length": (Case(arguments={"train_sampling_strategy": "group_by_length"}), {}),
    "gradient checkpointing": (Case(arguments={"gradient_checkpointing": True}), {}),
    "best model": (
        Case(
            arguments={
                "load_best_model_at_end": True,
                "metric_for_best_model": "loss",
                "greater_is_better": True,  # an earlier one
                "save_steps": 2,
                "eval_steps": 2,
            }
        ),
        {},
    ),
    "gemma2": (Case(kind="gemma2", sizes={"head_dim": 8, "sliding_window": 8}), {}),
    "mixtral": (Case(kind="mixtral", sizes={"num_local_experts": 4, "num_experts_per_tok": 2}), {}),
    "tokens seen": (Case(arguments={"include_num_input_tokens_seen": "all"}), {}),
    "gpt2": (
        Case(
            kind="gpt2",
            sizes={"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
            | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ),
        {"weights": 1e-3},  # of key biases, whose gradients are rounding
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_as_in_two_processes(name, tmp_path):
    case, tolerances = CASES[name]
    expected, _ = run_ranks(trained, 2, case, str(tmp_path / "ddp"))
    left = run_ranks(trained, 4, case._replace(schedule="zb_v", options=TWO), str(tmp_path / "piped"))
    assert_same(left[0], expected, **tolerances)
    assert all(each.found == pytest.approx(expected.found, rel=1e-5) for each in left)
    seen = [[each.get("num_input_tokens_seen") for each in logs] for logs in (left[0].logs, expected.logs)]
    assert seen[0] == seen[1]


@pytest.mark.nightly
def test_a_checkpoint_goes_on_in_one_process_and_one_of_one_process_in_two_pipelines(tmp_path):
    """Where rows fill all batches, one process with twice the microbatches trains on the same ones."""
    few = {"eval_strategy": "no", "dataloader_drop_last": True, "save_steps": 2, "max_steps": 5}
    one, two = (TIED._replace(arguments={**few, "gradient_accumulation_steps": num}) for num in (4, 2))
    two = two._replace(schedule="zb_h1", options=TWO)
    (expected,) = run_ranks(trained, 1, one, str(tmp_path / "one"))
    assert_same(run_ranks(trained, 4, two, str(tmp_path / "two"))[0], expected)
    resumed = two._replace(resume=str(tmp_path / "one/run/checkpoint-2"))
    assert_same(run_ranks(trained, 4, resumed, str(tmp_path / "to"))[0], expected, first=3)
    (left,) = run_ranks(
        trained, 1, one._replace(resume=str(tmp_path / "two/run/checkpoint-2")), str(tmp_path / "from")
    )
    assert_same(left, expected, first=3)
