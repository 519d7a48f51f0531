"""Every choice under configs/ composes, and what is wrong with a config is said with its key."""

import importlib.util
import json
from copy import deepcopy
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zbpp import config as configs
from zbpp.planning import SCHEDULES, plan
from zbpp.run.checks import check_config, check_together
from zbpp.run.data import build_data
from zbpp.run.model import build_model, build_stages

FOLDER = Path(__file__).parent.parent / "configs"
HUGE = {"gpt_small", "llama_1b"}  # gigabytes of weights: composed, not built
GOES_WITH = dict.fromkeys(["mlp", "emulated", "emulated_6_2b"], "regression")  # the others read text

configs.register()


def composed(*overrides, name="train"):
    given = [] if name == "explain" else ["run_dir=somewhere"]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose(name, overrides=[*given, *overrides])


def typed(*overrides, name="train"):
    return configs.typed(composed(*overrides, name=name))


def choices(group):
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def all_choices():
    of_others = {"cluster", "experiment"}  # for `zbpp plan`; for the whole config
    groups = {path.name for path in FOLDER.iterdir() if path.is_dir()} - of_others
    return [(group, name) for group in sorted(groups) for name in choices(group)]


@pytest.mark.parametrize(("group", "name"), all_choices())
def test_every_choice_composes(group, name):
    needs = {"model": [f"data={GOES_WITH.get(name, 'stdlib')}"], "data": []}.get(group, [])
    if (group, name) == ("model", "custom"):
        needs = ["++model._target_=my_file.MyModel", "data=regression"]
    if (group, name) == ("data", "custom"):
        needs = ["data._target_=my_file.my_data"]
    if (group, name) == ("optimizer", "custom"):
        needs = ["optimizer.build._target_=torch.optim.SGD"]
    if (group, name) == ("data", "chat"):
        needs = ["data.path=somewhere", "data.tokenizer=tokenizer.json"]
    if (group, name) == ("data", "text"):
        needs = ["data.path=somewhere"]
    config = typed(f"{group}={name}", *needs)
    assert isinstance(config, configs.TrainConfig)


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_recipe_composes_by_the_command_in_its_file(name):
    lines = (FOLDER / "experiment" / f"{name}.yaml").read_text().splitlines()
    (command,) = (line.removeprefix("#   ") for line in lines if line.startswith("#   zbpp train"))
    _, _, _, num_ranks, *overrides = command.split()
    assert f"+experiment={name}" in overrides
    config = typed(*overrides)
    slices = config.schedule.slices or 1
    made = plan(config.schedule.name, int(num_ranks), config.num_microbatches, num_slices=slices)
    layers = composed(*overrides).model.get("layers_per_stage")
    assert layers in (None, "auto") or len(layers) == made.num_stages


def test_the_schedules_are_those_that_plan_knows_and_one_that_measures_first():
    assert choices("schedule") == sorted([*SCHEDULES, "auto"])
    for name in SCHEDULES:
        schedule = typed(f"schedule={name}").schedule
        assert (schedule.name, schedule.replan) == (name, None)
    auto = typed("schedule=auto").schedule
    assert {auto.name, auto.replan} <= set(SCHEDULES)
    plan(auto.name, 2, 4, **auto.options)


@pytest.mark.parametrize("name", [name for name in choices("model") if name not in {*HUGE, "custom"}])
def test_every_small_model_builds_its_stages_and_its_data_fits(name):
    config = typed(f"model={name}", f"data={GOES_WITH.get(name, 'stdlib')}", "num_microbatches=2")
    model = build_model(config.model)
    timetable = plan("zb_h1", 2, 2)
    stages = build_stages(model, timetable, 0) | build_stages(model, timetable, 1)
    assert sorted(stages) == [0, 1]
    inputs, target = build_data(config.data, config.batch_size, config.seed).train.batch(0)
    assert len(inputs) == config.batch_size
    assert model.loss(stages[1](stages[0](inputs)), target).isfinite()


def test_bench_and_measure_compose():
    config = typed(name="bench")
    assert isinstance(config, configs.BenchConfig)
    assert set(config.schedules) <= set(SCHEDULES)
    assert config.compare == "torch"
    assert typed(name="measure").schedule.name in SCHEDULES


def test_the_fixed_overrides_are_keys_of_the_tree():
    """What scripts and other tools rely on: issue 2's names."""
    config = typed(
        "schedule=zb_h1", "model=gpt_tiny", "steps=50", "num_microbatches=8", "microbatch_size=4", "seed=0"
    )
    found = (config.schedule.name, config.steps, config.num_microbatches, config.microbatch_size, config.seed)
    assert found == ("zb_h1", 50, 8, 4, 0)
    assert config.run_dir == "somewhere"
    assert config.batch_size == 32


def test_an_optimizer_and_a_scheduler_are_named_without_a_plus():
    chosen = typed(
        "optimizer=custom",
        "optimizer.build._target_=torch.optim.SGD",
        "optimizer.build.lr=0.1",
        "optimizer.lr_scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR",
        "optimizer.lr_scheduler.T_max=${steps}",
        "optimizer.groups=[{match:['*.bias','norm*'],weight_decay:0.0}]",
    ).optimizer
    assert chosen.build == {"_target_": "torch.optim.SGD", "lr": 0.1}
    assert chosen.lr_scheduler["T_max"] == 100
    assert chosen.groups == [{"match": ["*.bias", "norm*"], "weight_decay": 0.0}]
    assert typed("optimizer.build=null").optimizer.name == "adamw"


def test_flat_is_what_ranks_compare_resolved_by_dotted_key():
    flat = configs.flat(composed("seed=7", "model.dropout=0.5"))
    assert flat["steps"] == 100
    assert flat["model.seed"] == 7  # an interpolation
    assert flat["model.dropout"] == 0.5
    assert flat["optimizer.clip_norm"] == 1.0
    assert "hydra.run.dir" not in flat


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=3", "stepz"),
        ("optimizer.learning_rat=1", "optimizer.learning_rat"),
        ("model.num_layerz=3", "model.num_layerz"),
        ("data.pth=x", "data.pth"),
        ("steps=many", "steps"),
        ("optimizer.warmup_steps=1.5", "optimizer.warmup_steps"),
        ("microbatch_size=null", "microbatch_size"),
        ("schedule=zb_h9", "zb_h1"),  # and the other choices
        ("model=gpt_huge", "gpt_tiny"),
    ],
)
def test_unknown_keys_wrong_types_and_unknown_choices_are_named(override, words):
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        composed(override)
    told = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert words in "\n".join(map(str, told))


REFUSED = {
    "train": [
        "steps=0", "num_microbatches=-1", "microbatch_size=0", "evaluation_batches=0", "evaluate_every=-1",
        "print_every=0", "precision=float16", "optimizer.learning_rate=0", "optimizer.beta1=1",
        "optimizer.beta2=-0.1", "optimizer.warmup_steps=-1", "optimizer.min_ratio=2", "optimizer.clip_norm=0",
        "optimizer.name=sgd", "compile=all", "memory.budget=2", "memory.limit=0", "memory.offload=-1",
        "memory.gradient_release=maybe", "memory.limit=[12,0]", "memory.limit=much", "parallel.speeds=[1,0]",
        "parallel.speeds=2", "parallel.speeds=[]", "parallel.messages=4bit",
        "parallel.message_boundaries=[0]", "parallel.device=tpu", "parallel.timeout=0", "profile=3",
        "profile=0:2", "profile=900:902", "run_dir=", "run_dir=???",
    ],
    "bench": [
        "num_ranks=0", "repeats=0", "schedules=[]", "compare=jax", "memory_limit=0",
        "precision=mixed_float16",
    ],
    "measure": ["lengths=[0.5,1]", "lengths=[0]"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "override"), [(name, each) for name, some in REFUSED.items() for each in some]
)
def test_a_value_out_of_range_is_refused_with_its_key_and_what_to_write(command, override):
    with pytest.raises(configs.ConfigError) as caught:
        typed(override, name=command)
    assert str(caught.value).startswith(override.partition("=")[0])
    assert "write" in str(caught.value) or "???" in override
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pair",
    [
        "cuda_graphs=true memory.recompute=block",
        "cuda_graphs=true parallel.tensor=2",
        "memory.budget=0.5 compile=none",
        "compile=stage memory.recompute=block",
        "compile=layer parallel.shard=2",
        "compile=layer parallel.context=2",
        "memory.recompute=stage parallel.shard=2",
        "memory.offload_weights=true compile=stage",
        "memory.offload_weights=true precision=mixed_bfloat16",
        "memory.offload_weights=true parallel.replicate=2",
        "memory.offload=auto schedule.costs=null",
        "memory.gradient_release=step optimizer.clip_norm=1.0",
        "memory.gradient_release=step precision=mixed_float16 optimizer.clip_norm=null",
        # What extras exclude:
        "memory.gradient_release=step memory.offload_weights=true optimizer.clip_norm=null",
        "memory.gradient_release=accumulate parallel.replicate=2 optimizer.clip_norm=null",
        "memory.gradient_release=accumulate memory.head_at_once=true optimizer.clip_norm=null",
        "memory.offload=auto memory.offload_weights=true schedule.costs=costs.json",
        "cuda_graphs=true optimizer.validation=after",
        "parallel.context=2 optimizer.validation=after",
        "parallel.context=2 cuda_graphs=true",
        "parallel.context=2 parallel.dynamic_shapes=true",
        "parallel.messages=8bit cuda_graphs=true",
        "parallel.messages=8bit precision=mixed_float16",
        "parallel.messages=bfloat16 precision=mixed_bfloat16",
        "memory.offload_weights=true parallel.context=2",
        "parallel.speeds=[1.0] model.layers_per_stage=null",
        "model.layers_per_stage=auto schedule.costs=costs.json",
        "model.layers_per_stage=auto memory.recompute=auto memory.limit=1",
        "model.layers_per_stage=auto schedule=zb_auto",
    ],
)
def test_two_switches_that_do_not_go_together_are_refused_by_both_names(pair):
    with pytest.raises(configs.ConfigError) as caught:
        check_together(typed(*pair.split()))
    one, other = pair.split()[:2]
    assert str(caught.value).startswith(f"{one} doesn't go with {other}: ")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data=text", "data.path: no value is given, and it needs one: write data.path=..."),
        ("data=chat data.path=x", "data.tokenizer: no value is given"),
        ("finetune.lora.target_modules=[q_proj]", "finetune.lora.r is not"),
        ("finetune.lora.lora_alpha=8", "finetune.lora.r is not"),
        ("finetune.lora.r=8", "finetune.lora.target_modules is not"),
    ],
)
def test_what_is_missing_is_named(override, words):
    """A lora without r trained the whole model."""
    if "lora" in override:
        pytest.importorskip("peft")
    with pytest.raises(configs.ConfigError, match=words):
        typed(*override.split())


PASSED_ON = [
    ("finetune.lora.rank=8", "did you mean finetune.lora.r?"),
    ("finetune.lora.alpha=8", "did you mean finetune.lora.lora_alpha?"),
    ("finetune.lora.target_module=[q_proj]", "did you mean finetune.lora.target_modules?"),
    ("+model.num_layer=2", "did you mean model.num_layers?"),
    ("+model.colour=red", "it takes vocab_size, num_layers, "),
    ("data=regression +data.in_feature=2", "did you mean data.in_features?"),
    (
        "optimizer=custom optimizer.build._target_=torch.optim.SGD +optimizer.build.momentun=1",
        "did you mean optimizer.build.momentum?",
    ),
    (
        "+optimizer.lr_scheduler._target_=torch.optim.lr_scheduler.StepLR +optimizer.lr_scheduler.stepsize=2",
        "did you mean optimizer.lr_scheduler.step_size?",
    ),
    (
        "callbacks=[{_target_:zbpp.training.callbacks.Profile,step:3}]",
        "did you mean callbacks[0].steps?",
    ),
    (
        "callbacks=[{_target_:builtins.dict,x:{_target_:torch.nn.Linear,in_feature:3}}]",
        "did you mean callbacks[0].x.in_features?",
    ),
]


@pytest.mark.parametrize(("overrides", "words"), PASSED_ON)
def test_a_key_that_a_class_does_not_take_is_refused_before_any_work_with_the_nearest_name(overrides, words):
    """finetune.lora.rank=8 trained the whole model; a scheduler's key was read when all models were built."""
    if "lora" in overrides:
        pytest.importorskip("peft")
    with pytest.raises(configs.ConfigError) as caught:
        check_config(typed(*overrides.split()))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_zbpp_measure_takes_what_is_fine_tuned():
    """It left finetune.* out, and measured the W of a model that is trained as a whole."""
    pytest.importorskip("peft")
    lora = ["finetune.lora.r=2", "finetune.lora.target_modules=[query]"]
    assert typed(*lora, name="measure").finetune == typed(*lora).finetune
    with pytest.raises(configs.ConfigError, match=r"finetune.lora.r is not set"):
        typed(*lora[1:], name="measure")


def numeric_fields(kind, prefix=""):
    """The dotted keys of all numbers below a config class, from its type hints alone."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from numeric_fields(hint, f"{prefix}{name}.")
        elif {int, float} & {hint, *get_args(hint)}:
            yield prefix + name


SCRIPTS = {
    "train": configs.TrainConfig, "bench": configs.BenchConfig, "measure": configs.MeasureConfig,
    "explain": configs.ExplainConfig,
}  # fmt: skip


def refusal_of(base, key, value):
    """What is said of a value; nothing if it is taken."""
    config = deepcopy(base)
    try:
        OmegaConf.update(config, key, value)
        configs.typed(config)
    except (configs.ConfigError, OmegaConfBaseException) as error:
        return f"{error} {getattr(error, 'full_key', '')}"
    return ""


@pytest.mark.parametrize(("script", "kind"), SCRIPTS.items())
def test_no_number_of_a_config_may_be_infinite_nan_or_negative(script, kind):
    """learning_rate=inf trained to NaN and ended with return code 0."""
    base, keys = composed(name=script), list(numeric_fields(kind))
    assert {"seed", "microbatch_size"} <= set(keys)
    for key in keys:
        for value in (float("inf"), -float("inf"), float("nan"), -1):
            told = refusal_of(base, key, value)
            assert key in told, (key, value, told)


def test_several_loggers_are_one_list():
    logger = typed("logger=[wandb,tensorboard]").logger
    assert (logger.wandb, logger.tensorboard) == (True, True)
    assert not typed("logger=tensorboard").logger.wandb


@pytest.mark.parametrize(
    ("package", "overrides"),
    [
        ("wandb", "logger=wandb"),
        ("optimi", "optimizer=lion"),
        ("peft", "finetune.lora.r=8 finetune.lora.target_modules=[q_proj]"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it(package, overrides, monkeypatch):
    typed(*overrides.split())
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(configs.ConfigError, match=rf"not installed: pip install 'zbpp\[{package}\]'"):
        typed(*overrides.split())


def test_gradient_release_may_be_off_without_quotes():
    """YAML reads it as false."""
    assert typed("memory.gradient_release=false").memory.gradient_release == "off"
    assert typed("memory.gradient_release=off").memory.gradient_release == "off"


def test_a_models_own_complaint_names_the_part_of_the_config():
    with pytest.raises(
        configs.ConfigError, match=r"model \(zbpp.models.gpt.Gpt\): .*num_heads=5: write hidden"
    ):
        build_model(typed("model.num_heads=5").model)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"max_position_embeddings": 131072}, 2048),
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 256}}, 256),
        ({"model_type": "bloom"}, 2048),  # its positions have no end
    ],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_a_folders_model_has_the_sequence_length_of_its_own_config(tmp_path, content, expected, as_file):
    """It was 64, whatever the model."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    source = f"model.config={tmp_path}/config.json" if as_file else f"model.path={tmp_path}"
    chat = ["data=chat", "data.path=a", "data.tokenizer=b", "model.vocab_size=300"]
    config = composed("model=huggingface", source, *chat)
    assert (config.model["sequence_length"], config.data["sequence_length"]) == (expected, expected)
    assert (
        composed("model=huggingface").model["sequence_length"] == 64
    )  # of a small config that is written out
