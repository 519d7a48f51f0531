"""Wrong uses of in_pipeline: each is refused in one line, before anything is made, with what to write."""

import os
import re
import time
import types
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from helpers.hf_trainer import ARGUMENTS, Case, forget_accelerate, model_of, padded, rows
from helpers.processes import run_ranks
from zbpp import plan

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from zbpp.transformers import in_pipeline, names  # noqa: E402  # after the check for its libraries
from zbpp.transformers.refusals import check_precision  # noqa: E402


def made(arguments=(), model=None, trainer=transformers.Trainer, **more):
    """A Trainer in a pipeline of one process."""
    args = transformers.TrainingArguments("unused", **{**ARGUMENTS, **dict(arguments)})
    model = model_of(Case()) if model is None else model
    return in_pipeline(trainer)(
        model=model, args=args, train_dataset=rows(4, 1), data_collator=padded, **more
    )


ARGUMENTS_REFUSED = {
    "torch_compile": True,
    "auto_find_batch_size": True,
    "use_liger_kernel": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "enable_jit_checkpoint": True,
    "torch_empty_cache_steps": 2,
    "label_names": ["targets"],
    "debug": "underflow_overflow",
    "save_on_each_node": True,
    "train_sampling_strategy": "batch_rebalance",
    "optim": "lomo",
}


@pytest.mark.parametrize("name", ARGUMENTS_REFUSED)
def test_arguments(name):
    with pytest.raises(ValueError, match=f"^{name}[^\n]*$"):
        made({name: ARGUMENTS_REFUSED[name], "eval_strategy": "no", "save_strategy": "no"})


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "parallelism_config"])
def test_arguments_that_the_library_checks_first(name):
    """They want packages or GPUs, so they are set afterwards."""
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
    setattr(args, name, True)
    with pytest.raises(ValueError, match=f"^{name} does not go with in_pipeline: [^\n]*$"):
        in_pipeline(transformers.Trainer)(model=model_of(Case()), args=args)


def test_generation_in_an_evaluation():
    args = transformers.Seq2SeqTrainingArguments(
        "unused", use_cpu=True, report_to=[], predict_with_generate=True
    )
    with pytest.raises(ValueError, match="^predict_with_generate[^\n]*load the saved model in one process$"):
        in_pipeline(transformers.Seq2SeqTrainer)(model=model_of(Case()), args=args)


def test_a_launcher_that_asks_for_fsdp(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="^accelerate's FSDP[^\n]*start the script with torchrun$"):
        made()


def test_several_processes_without_a_gpu_and_without_use_cpu(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = transformers.TrainingArguments("unused", report_to=[])
    with pytest.raises(
        ValueError, match="^2 processes were started, and no GPU is here: write use_cpu=True$"
    ):
        in_pipeline(transformers.Trainer)(model=model_of(Case()), args=args)


def classifier():
    return transformers.LlamaForSequenceClassification(model_of(Case()).config)


def replaced_forward():
    model = model_of(Case())
    model.forward = types.MethodType(lambda self, **inputs: type(self).forward(self, **inputs), model)
    return model


def with_config(**values):
    model = model_of(Case())
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def prompt_tuning():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(model_of(Case()), config)


def quantized():
    model = model_of(Case())
    model.is_quantized, model.quantization_method = True, "gptq"
    return model


MODELS = {
    "LlamaForCausalLM, not LlamaForSequenceClassification": classifier,
    "replaced the model's forward": replaced_forward,
    "output_hidden_states": lambda: with_config(output_hidden_states=True),
    "output_router_logits": lambda: with_config(output_router_logits=True),
    "PROMPT_TUNING": prompt_tuning,
    "not a torch.nn.Linear|not.*Linear": lambda: torch.nn.Linear(2, 2),
    "in a DataParallel": lambda: torch.nn.DataParallel(model_of(Case())),
    "quantized by gptq[^\n]*BitsAndBytesConfig": quantized,
    "has no config.json": lambda: "/nowhere",
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("text", MODELS)
def test_models(text):
    with pytest.raises(ValueError, match=f"^[^\n]*({text})[^\n]*$"):
        made({"eval_strategy": "no"}, model=MODELS[text]())


def test_a_model_on_a_device_already():
    model = model_of(Case())
    device = types.SimpleNamespace(type="cuda")
    model.parameters = lambda: iter([types.SimpleNamespace(device=device)])
    with pytest.raises(ValueError, match="already, whole: leave device_map and .to"):
        made(model=model)


@pytest.mark.parametrize(
    "config, text",
    [
        (transformers.BitsAndBytesConfig(), "neither load_in_4bit nor load_in_8bit"),
        (transformers.GPTQConfig(bits=4), "write a BitsAndBytesConfig"),
        (
            transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=True),
            "llm_int8_enable_fp32_cpu_offload: [^\n]*leave it out",
        ),
    ],
)
def test_quantizations_of_a_folder(config, text, tmp_path):
    model_of(Case()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^[^\n]*{text}"):
        made(model=str(tmp_path), quantization_config=config)


def test_a_version_of_trl_that_lacks_an_attribute():
    trainer = type("SFTTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.its_file"})
    with pytest.raises(
        ValueError, match="^this version of trl has no _metrics, _total_train_tokens[^\n]*install"
    ):
        made({"eval_strategy": "no"}, trainer=trainer)


def test_model_init_and_a_search_which_make_models_anew():
    with pytest.raises(ValueError, match="^model_init makes models anew"):
        in_pipeline(transformers.Trainer)(model_init=model_of)
    with pytest.raises(ValueError, match="^hyperparameter_search makes models anew"):
        made({"eval_strategy": "no"}).hyperparameter_search()


@contextmanager
def cut_and_closed(trainer):
    """The pipeline of one process has a group, which ends with it."""
    try:
        yield
    finally:
        if trainer._cut is not None:
            trainer.pipeline.close()


def test_an_optimizer_of_another_model():
    optimizer = torch.optim.SGD(model_of(Case()).parameters(), lr=0.1)
    trainer = made({"eval_strategy": "no"}, optimizers=(optimizer, None))
    with cut_and_closed(trainer), pytest.raises(ValueError, match="parameters that are not the model's"):
        trainer.train()


class AsksForHiddenStates(transformers.Trainer):
    """Its loss reads what no stage has."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, output_hidden_states=True).hidden_states[0].sum()


class RunsOtherTokens(transformers.Trainer):
    """Its loss runs the model on other tokens than the batch's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"].flip(1)).logits.sum()


@pytest.mark.parametrize(
    "trainer, text",
    [(AsksForHiddenStates, "asks the model for output_hidden_states"), (RunsOtherTokens, "on other tokens")],
)
def test_a_compute_loss_that_reads_more_than_logits(trainer, text):
    made_one = made({"eval_strategy": "no"}, trainer=trainer)
    with cut_and_closed(made_one), pytest.raises(ValueError, match=text):
        made_one.train()


def test_what_a_pipeline_over_all_processes_chooses_itself():
    for name in ("mesh", "group", "num_microbatches"):
        with pytest.raises(ValueError, match=f"^in_pipeline makes one pipeline [^\n]* chooses {name} itself"):
            in_pipeline(transformers.Trainer, **{name: 2})


def test_slices_with_a_loss_of_whole_sequences():
    args = transformers.TrainingArguments(
        "unused", **{**ARGUMENTS, "eval_strategy": "no", "label_smoothing_factor": 0.1}
    )
    chosen = in_pipeline(transformers.Trainer, sliced, slice_bounds=[0, 6, 12])
    trainer = chosen(model=model_of(Case()), args=args, train_dataset=rows(4, 1), data_collator=padded)
    with pytest.raises(ValueError, match="^the schedule cuts sequences into slices[^\n]*without slices$"):
        trainer.train()


def sliced(num_ranks, num_microbatches):
    return plan("zb_v", num_ranks, num_microbatches, num_slices=2)


@pytest.mark.parametrize("name", ["GRPOTrainer", "KTOTrainer"])
def test_a_trainer_of_trl_that_generates_or_runs_other_tokens(name):
    trainer = type(name, (transformers.Trainer,), {"__module__": "trl.trainer.its_file"})
    with pytest.raises(ValueError, match=f"^{name} can't train [^\n]*: [^\n]*SFTTrainer and DPOTrainer can$"):
        in_pipeline(trainer)


def test_a_reference_model_that_runs_in_each_step_and_figures_of_a_folder():
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
    args.precompute_ref_log_probs = False
    with pytest.raises(ValueError, match="^DPO's reference model[^\n]*write precompute_ref_log_probs=True"):
        in_pipeline(transformers.Trainer)(model=model_of(Case()), args=args)
    args.precompute_ref_log_probs = True
    with pytest.raises(ValueError, match="^precompute_ref_log_probs runs the whole model[^\n]*instead of"):
        in_pipeline(transformers.Trainer)(model="/nowhere", args=args)


def test_a_precision_of_the_launcher():
    with pytest.raises(ValueError, match="^accelerate's mixed precision fp8[^\n]*torchrun, and write bf16"):
        check_precision("fp8")


@pytest.mark.parametrize("replicas", [0, 3, True, 2.0, "2"])
def test_replicas_that_do_not_divide_the_processes(replicas, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="^replicas=[^\n]* does not divide the number of processes, 4"):
        in_pipeline(transformers.Trainer, replicas=replicas)(model=model_of(Case()))


@pytest.mark.parametrize(
    "name, value", [("average_tokens_across_devices", False), ("eval_use_gather_object", True)]
)
def test_arguments_that_do_not_go_with_replicas(name, value, monkeypatch):
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[], **{name: value})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"^{name} does not go with replicas=2: [^\n]*$"):
        in_pipeline(transformers.Trainer, replicas=2)(model=model_of(Case()), args=args)


class OwnStep(transformers.Trainer):
    """A pipeline would not call this step."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_training_step_of_the_users():
    with pytest.raises(ValueError, match="^OwnStep has a training_step of its own[^\n]*write compute_loss"):
        in_pipeline(OwnStep)


def test_a_version_of_transformers_that_lacks_a_name(monkeypatch):
    monkeypatch.delattr(transformers.Trainer, "_wrap_model")
    with pytest.raises(ValueError, match=r"^Trainer of transformers \S+ has no _wrap_model, [^\n]*install"):
        in_pipeline(transformers.Trainer)


def test_the_table_of_names_has_what_is_overridden():
    from zbpp.transformers.trainer import PipelineTrainer

    own = {name for each in PipelineTrainer.__mro__[:3] for name in vars(each)}
    assert {name for name in own if hasattr(transformers.Trainer, name) and name[:2] != "__"} == {
        *names.OVERRIDDEN
    }


def test_a_choice_of_the_cut_that_nobody_can_make():
    with pytest.raises(ValueError, match=r"^layers_per_stage='even': write \"auto\", or how many[^\n]*$"):
        in_pipeline(transformers.Trainer, layers_per_stage="even")
    with pytest.raises(ValueError, match="^layers_per_stage='auto' [^\n]* schedule that has a name[^\n]*$"):
        in_pipeline(transformers.Trainer, sliced, layers_per_stage="auto")
    with pytest.raises(
        ValueError, match="^layers_per_stage='auto' asks args [^\n]*: give TrainingArguments$"
    ):
        in_pipeline(transformers.Trainer, layers_per_stage="auto")(model="/nowhere")


def cut_in_two(rank, adapted, folder):
    """What save_model, which cuts the model, has written once it returns; what the model then says."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    model = model_of(Case())
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    trainer = made({"eval_strategy": "no"}, model=model)
    write = trainer._save
    trainer._save = lambda *args: (time.sleep(1), write(*args))  # rank 1 has to wait
    trainer.save_model(folder)
    files, texts = os.listdir(folder), []
    for call in (
        lambda: trainer.model(input_ids=torch.ones(1, 4, dtype=torch.int64)),
        lambda: trainer.model.generate(torch.ones(1, 4, dtype=torch.int64)),
        lambda: trainer.model.save_pretrained(f"{folder}/alone"),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        texts.append(str(raised.value))
    trainer.pipeline.close()
    forget_accelerate()
    return files, texts


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_model_without_other_ranks_layers_says_what_to_write_and_save_model_waits(adapted, tmp_path):
    for files, texts in run_ranks(cut_in_two, 2, adapted, str(tmp_path / "saved")):
        assert ("adapter_model.safetensors" if adapted else "model.safetensors") in files
        forward, generate, save = texts
        assert re.fullmatch("no rank has the whole model[^\n]* trainer.predict or trainer.evaluate", forward)
        assert re.fullmatch(
            "no rank has the whole model[^\n]* load what trainer.save_model has[^\n]*", generate
        )
        assert re.fullmatch("no rank has the whole model[^\n]* trainer.save_model[^\n]* on all ranks", save)
    if not adapted:
        state, saved = model_of(Case()).state_dict(), load_file(tmp_path / "saved/model.safetensors")
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[name], each) for name, each in state.items())
