"""What a script may ask of the Trainer, in a pipeline against one process: a case a row."""

import multiprocessing
import os
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.hf_trainer import Case, assert_same, trained
from helpers.processes import run_ranks
from zbpp import plan

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = pytest.mark.nightly

ROUNDED = {"rel": 2e-3, "weights": 3e-3}  # 16 bits


def lora(model):
    return _adapted(model, target_modules=["q_proj", "v_proj"])


def dora(model):
    """With magnitudes, on all linear layers, and a head that is trained whole."""
    return _adapted(model, target_modules="all-linear", use_dora=True, modules_to_save=["lm_head"])


def frozen(model):
    """The first stage has nothing to train."""
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model


def _adapted(model, **options):
    import peft

    torch.manual_seed(2)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **options)
    )


def own_loss(outputs, labels, num_items_in_batch=None):
    """Cross-entropy and a term that keeps logits small, over the items of a step."""
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
    return (total + 1e-2 * (logits.logsumexp(-1).square() * (target != -100)).sum()) / num_items_in_batch


def chosen(logits, labels):
    return logits.argmax(-1)


def accuracy(found):
    tokens, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((tokens == labels)[labels != -100].mean())}


def predicted(trainer):
    """The shape and the sum of what predict returns, and metrics of an evaluation of two data sets."""
    found = trainer.predict(trainer.eval_dataset)
    named = trainer.evaluate({"first": trainer.eval_dataset, "second": trainer.train_dataset})
    return [
        *found.predictions.shape,
        int(np.asarray(found.predictions, dtype=np.int64).sum()),
        found.metrics["test_accuracy"],
        named["eval_first_loss"],
        named["eval_second_accuracy"],
    ]


def twice(trainer):
    """The losses of a second train(), which begins with the weights of the first."""
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def plain_mean(trainer):
    """A compute_loss of the user's, a mean over each microbatch with a term of the logits."""

    class Mine(trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss + 1e-3 * outputs.logits.logsumexp(-1).square().mean()
            return (loss, outputs) if return_outputs else loss

    return Mine


def evaluated_first(trainer):
    """The model is cut before there is an optimizer."""

    class Mine(trainer):
        def train(self, **options):
            self.evaluate()
            return super().train(**options)

    return Mine


def without_a_target(trainer):
    """A batch of the evaluation has no target, and the library's loss is NaN."""

    class Mine(trainer):
        def __init__(self, **given):
            super().__init__(**given)
            for row in self.eval_dataset[:5]:
                row["labels"] = [-100] * len(row["labels"])

    return Mine


class Hits:
    """Metrics of batches: tokens that are right, over all of them."""

    def __init__(self):
        self._hits = 0

    def __call__(self, found, compute_result=False):
        tokens, labels = found.predictions.argmax(-1)[:, :-1], found.label_ids[:, 1:]
        self._hits += int((tokens == labels)[labels != -100].sum())
        if not compute_result:
            return {}
        hits, self._hits = self._hits, 0
        return {"accuracy": hits}


def sums(found):
    """The metrics count inputs and losses of an evaluation."""
    return {"accuracy": float(found.inputs.sum() + np.sum(found.losses))}


def allows_children(model):
    """Processes of the tests' pool are daemons, which may have none."""
    multiprocessing.current_process()._config["daemon"] = False
    return model


def with_constant_noise(trainer):
    """NEFTune adds the same to each element, and the model is cut before it begins."""

    class Mine(evaluated_first(trainer)):
        def train(self, **options):
            with mock.patch.object(
                torch.Tensor, "uniform_", lambda self, low=0, high=1, **_: self.fill_(high)
            ):
                return super().train(**options)

    return Mine


class Hub:
    """Keeps the names of the files that would be uploaded."""

    def __init__(self):
        self.files = []

    def create_repo(self, *_, **__):
        return SimpleNamespace(repo_id="me/run")

    def upload_folder(self, *_, folder_path, **__):
        self.files.append(sorted(os.listdir(folder_path)))
        return SimpleNamespace(is_done=lambda: True, result=lambda: None)


def uploads(trainer):
    """The last upload of rank 0 is in `found` of all ranks."""
    hub = Hub()
    trainer.hub_model_id = "me/run"
    with mock.patch("transformers.trainer.hf_api", return_value=hub):
        trainer.push_to_hub()
    files = [hub.files[-1:]]
    if dist.is_initialized():
        dist.broadcast_object_list(files, src=0)
    return [files[0][0].index(name) for name in ("config.json", "model.safetensors")] + [len(files[0][0])]


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
EVERY_3 = {"save_steps": 3, "eval_steps": 3}

CASES = {
    "lora": (Case(change=lora), {"weights": 1e-4}),
    "dora": (Case(change=dora), {"weights": 1e-4}),
    "frozen": (Case(change=frozen), {}),
    "label smoothing": (Case(arguments={"label_smoothing_factor": 0.1}), {}),
    "compute_loss_func": (Case(more={"compute_loss_func": own_loss}), {}),
    "compute_loss": (Case(trainer=plain_mean), {}),
    "compute_metrics": (
        Case(more={"compute_metrics": accuracy, "preprocess_logits_for_metrics": chosen}, finish=predicted),
        {},
    ),
    "best model": (Case(arguments={**BEST, **EVERY_3}), {}),
    "best adapter": (Case(arguments={**BEST, **EVERY_3}, change=lora), {"weights": 1e-4}),
    "bf16": (Case(arguments={"bf16": True}), ROUNDED),
    "bf16 label smoothing": (Case(arguments={"bf16": True, "label_smoothing_factor": 0.1}), ROUNDED),
    "gradient checkpointing": (Case(arguments={"gradient_checkpointing": True}), {}),
    "reentrant checkpointing": (
        Case(
            arguments={
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            }
        ),
        {},
    ),
    "grouped by length": (Case(arguments={"train_sampling_strategy": "group_by_length"}), {}),
    "no clipping": (Case(arguments={"max_grad_norm": 0.0}), {}),
    "sgd": (Case(arguments={"optim": "sgd", "learning_rate": 0.1}), {}),
    "adafactor": (Case(arguments={"optim": "adafactor"}), {"weights": 1e-4}),
    "adagrad": (Case(arguments={"optim": "adagrad"}), {"weights": 1e-4}),
    "8 bits": (Case(arguments={"optim": "adamw_bnb_8bit"}), {"weights": 1e-3}),
    "workers": (
        Case(
            arguments={"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
            change=allows_children,
        ),
        {},
    ),
    "noise": (Case(arguments={"neftune_noise_alpha": 5.0}, trainer=with_constant_noise), {"weights": 1e-4}),
    "metrics of batches": (
        Case(arguments={"batch_eval_metrics": True}, more={"compute_metrics": Hits()}),
        {},
    ),
    "metrics of inputs": (
        Case(
            arguments={"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1},
            more={"compute_metrics": sums},
        ),
        {},
    ),
    "hub": (Case(finish=uploads), {}),
    "plateau": (
        Case(arguments={"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 1}),
        {"rel": 1e-5, "weights": 1e-4},
    ),
    "drop last": (Case(arguments={"dataloader_drop_last": True}), {}),
    "epochs": (
        Case(arguments={"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}),
        {},
    ),
    "evaluated first": (Case(trainer=evaluated_first), {}),
    "a batch without targets": (Case(trainer=without_a_target), {}),
    "twice": (Case(finish=twice), {}),
    "one microbatch": (Case(arguments={"gradient_accumulation_steps": 1, "max_steps": 8}), {}),
    "gpt2": (
        Case(
            kind="gpt2",
            sizes={"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
            | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ),
        {"weights": 1e-3},  # of key biases, whose gradients are rounding
    ),
    "gemma2": (Case(kind="gemma2", sizes={"head_dim": 8, "sliding_window": 8}), {}),
    "mixtral": (Case(kind="mixtral", sizes={"num_local_experts": 4, "num_experts_per_tok": 2}), {}),
}


# What most scripts have. Slices go with the model's own loss, and without the library's checkpointing.
IN_SLICES = ("lora", "dora", "compute_metrics", "best model", "grouped by length", "gemma2", "mixtral")
IN_FOUR = (*IN_SLICES, "label smoothing", "compute_loss_func", "gradient checkpointing")


def in_layers(case, count):
    return case._replace(sizes={**case.sizes, "num_hidden_layers": count})


def assert_same_on_all(left, expected, **tolerances):
    assert_same(left[0], expected, **tolerances)
    assert all(each.found == pytest.approx(expected.found, rel=1e-5) for each in left)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_as_in_one_process(name, tmp_path):
    case, tolerances = CASES[name]
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    both = run_ranks(trained, 2, case._replace(schedule="zb_v"), str(tmp_path / "piped"))
    assert_same_on_all(both, expected, **tolerances)


@pytest.mark.parametrize("name", IN_FOUR)
def test_four_processes_are_as_one(name, tmp_path):
    case, tolerances = CASES[name]
    case = in_layers(case, 8)
    if name == "gemma2":  # one process's norm is 4e-6 from that in float64, the pipeline's 1e-6
        tolerances = {"rel": 1e-5}
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    four = run_ranks(trained, 4, case._replace(schedule="zb_v"), str(tmp_path / "piped"))
    assert_same_on_all(four, expected, **tolerances)


def sliced(num_ranks, num_microbatches):
    return plan("zb_v", num_ranks, num_microbatches, num_slices=2)


@pytest.mark.parametrize("name", IN_SLICES)
def test_a_case_in_slices(name, tmp_path):
    case, tolerances = CASES[name]
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    case = case._replace(schedule=sliced, options={"slice_bounds": [0, 6, 12]})
    assert_same_on_all(run_ranks(trained, 2, case, str(tmp_path / "piped")), expected, **tolerances)


@pytest.mark.parametrize(("num_ranks", "is_tied"), [(2, False), (4, True)])
def test_sequences_in_slices(num_ranks, is_tied, tmp_path):
    case = in_layers(Case(sizes={"tie_word_embeddings": is_tied}), 2 * num_ranks)
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    case = case._replace(schedule=sliced, options={"slice_bounds": [0, 6, 12]})
    assert_same(run_ranks(trained, num_ranks, case, str(tmp_path / "piped"))[0], expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("zb_h1", 2), ("zb_v", 2)),
        (("zb_h1", 2), ("zb_v", 4)),
        (("zb_v", 2), ("1f1b", 4)),
        (("zb_v", 4), ("zb_h1", 2)),
    ],
)
def test_another_pipeline_goes_on(first, then, tmp_path):
    case = Case(sizes={"tie_word_embeddings": True, "num_hidden_layers": 8})
    (expected,) = run_ranks(trained, 1, case, str(tmp_path / "alone"))
    schedule, num_ranks = first
    left = run_ranks(trained, num_ranks, case._replace(schedule=schedule), str(tmp_path / "first"))
    assert_same(left[0], expected)
    schedule, num_ranks = then
    resumed = case._replace(schedule=schedule, resume=str(tmp_path / "first/run/checkpoint-4"))
    left = run_ranks(trained, num_ranks, resumed, str(tmp_path / "then"))
    assert_same(left[0], expected, first=5)
