"""What the commands make of their arguments, their help, and a mistake in them: one line."""

import re
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from zbpp import config as configs
from zbpp.__main__ import main as zbpp_command
from zbpp.commands import command_line
from zbpp.config import ConfigError, without_batching
from zbpp.launch import Refusal

FOLDER = Path(__file__).parent.parent / "configs"
COMMANDS = ("train", "bench", "measure", "explain")

configs.register()


def composed(*given, name="train"):
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose(name, overrides=command_line.arguments(list(given)))


# ---------------------------------------------------------------- a class of the user's


def test_a_model_named_by_target_gets_no_key_of_the_default_model():
    """model._target_=my_file.Tower got gpt_tiny's vocab_size, num_heads, ... as unexpected arguments."""
    given = ["model._target_=my_file.Tower", "model.hidden_size=32", "data=regression"]
    config = composed(*given)
    assert config.model == {"_target_": "my_file.Tower", "hidden_size": 32}
    assert config.data.in_features == 32
    assert composed(*given[:1], "data=regression").model == {"_target_": "my_file.Tower"}


def test_data_named_by_target_gets_no_key_of_the_default_data():
    given = ["data._target_=my_file.batches", "data.rows=3"]
    assert without_batching(composed(*given).data) == {"_target_": "my_file.batches", "rows": 3}


def test_a_target_beside_a_chosen_model_keeps_that_models_keys():
    config = composed("model=mlp", "model._target_=my_file.MyMlp", "data=regression")
    assert config.model == {**composed("model=mlp", "data=regression").model, "_target_": "my_file.MyMlp"}


def test_a_model_chosen_as_custom_takes_any_key():
    given = ["model=custom", "model._target_=my_file.Tower", "model.depth=3", "data=regression"]
    assert composed(*given).model == {"_target_": "my_file.Tower", "depth": 3}


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_key_of_the_command(command):
    text, nodes = configs.help_text(command, "what it does"), r"(model|data|optimizer\.\w+)\.|schedule\.name"
    keys = [key for key in configs.flat(composed(name=command)) if not re.match(nodes, key)]
    assert [key for key in keys if f"\n  {key}=" not in text] == []


@pytest.mark.parametrize("flags", [["-n", "4"], ["-n4"]])
def test_n_is_short_for_the_number_of_ranks(flags):
    assert command_line.arguments(["steps=3", *flags, "seed=1"], "train") == [
        "parallel.num_processes=4", "steps=3", "seed=1",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="-n steps=3: write how many ranks"):
        command_line.arguments(["-n", "steps=3"], "train")
    assert command_line.arguments(flags, "bench") == command_line.arguments(flags, "measure")
    assert command_line.arguments(flags, "bench") == ["num_ranks=4"]


def test_a_models_folder_says_the_size_of_its_vocabulary(tmp_path):
    """The default's 256 was taken for it, and the data refused."""
    given = ["model=huggingface", f"model.path={tmp_path}"]
    assert configs.typed(composed("model=huggingface")).model["vocab_size"] == 256
    assert configs.typed(composed(*given)).model["vocab_size"] is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 320}}')
    assert configs.typed(composed(*given)).data["vocab_size"] == 320
    assert configs.typed(composed(*given, "model.vocab_size=300")).model["vocab_size"] == 300


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("-n 2 parallel.num_processes=3", "-n is short for parallel.num_processes: write one of the two"),
        ("--n 2", "--n is no option; did you mean -n?"),
        ("--nosuch steps=3", "--nosuch is no option: zbpp train --help"),
        ("--steps 10", "write steps=10"),
        ("--microbatch-size=4", "write microbatch_size=4"),
        ("--model gpt_tiny --steps", "write model=gpt_tiny"),
        ("--lr 1e-3", "write optimizer.learning_rate=1e-3"),
        ("steps = 10", "steps = 10: write steps=10, without spaces"),
        ("steps= 10 model=mlp", "write steps=10,"),
        ("steps =10", "write steps=10,"),
        ("model=mlp steps 10", "write steps=10,"),
        ("--config-dir folder steps", "steps: write steps=..."),
    ],
)
def test_an_option_or_a_key_in_another_form_is_refused_with_the_form_to_write(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        command_line.arguments(given.split())
    command_line.arguments(["--config-dir", "folder", "-cn=train", "steps=3", "run_dir=", "~data"])


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_groups_that_the_command_takes_with_all_choices_and_no_other(command):
    """bench --help listed schedule, optimizer, logger, ... and refused each of them."""
    text = configs.help_text(command, "what it does")
    shown = dict(re.findall(r"^(\w+)=\w+.*\n    (.*)$", text, flags=re.M))
    for group in (path.name for path in FOLDER.iterdir() if path.is_dir()):
        files = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
        if group in shown:
            assert shown[group].split(", ") == files
            continue
        with pytest.raises(Exception, match="Could not override") as caught:
            composed(f"{group}={files[0]}", name=command)
        assert configs.composition_error(caught.value) is not None


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("model=gpt_tony", "model=gpt_tony: there is no such choice; known: custom, emulated, "),
        ("stepz=3", "stepz: there is no such key; did you mean steps?"),
        ("learning_rat=1e-3", "did you mean optimizer.learning_rate?"),
        ("optimiser.lr=1e-3", "optimiser.lr: there is no such key; did you mean optimizer.learning_rate (or"),
        ("optimiser.eps=1e-3", "did you mean optimizer.eps?"),
        ("device=cpu", "did you mean parallel.device?"),
        ("num_ranks=2", "did you mean parallel.num_processes (-n 4)?"),
        ("modle=gpt_tiny", "did you mean model?"),
        (
            "model.num_layer=2",
            "model.num_layer: Gpt has no argument num_layer; did you mean model.num_layers?",
        ),
        ("model.load_in_4bit=true", "model.load_in_4bit: Gpt has no argument load_in_4bit; it takes"),
        ("model.config.x=2", "model.config: Gpt has no argument config"),
        ("xyzzy=1", "xyzzy: there is no such key"),
        ("+step=2", "step: there is no such key; did you mean steps?"),
        ("++optimizer.learning_rat=1", "did you mean optimizer.learning_rate?"),
        ("+parallel.processes=2", "did you mean parallel.num_processes?"),
        ("steps=many", "steps: 'many' is no value for it: write a whole number"),
        ("steps=2.5", "steps: '2.5' is no value for it: write a whole number"),
        ("data.packing=maybe", "data.packing: 'maybe' is no value for it: write true or false"),
        ("callbacks=3", "callbacks: one value is no list: write [...]"),
        ("schedule.slices=-3", "schedule.slices=-3: write how many, as 8; or"),
        ("schedule.slices=[0,64]", "schedule.slices=[0, 64] is one slice, which cuts nothing: leave it out"),
        ("microbatch_size=null", "microbatch_size: it can't be null"),
        ("schedule=zbh1", "schedule=zbh1: there is no such choice; known: 1f1b, auto, dualpipe_v,"),
        ("schedule=zbh1", "; did you mean zb_h1?"),
        ("optimizer=sgd", "stable_adamw. Any optimizer: optimizer=custom optimizer.build._target_="),
        ("fine_tune.lora.r=8", "fine_tune.lora.r: there is no such key; did you mean finetune?"),
        ("steps=[3", "no viable alternative at input '[3'"),
        ("optimizer=null", "Config group override must be a string or a list"),
        (
            f"model._target_={__name__}.Tower",
            "write data._target_=my_file.my_data for data of yours, or data=",
        ),
        ("model._target_=nigth.Net", "there is no module nigth, neither installed nor in the current"),
        (
            "data=text",
            "data.path: no value is given, and it needs one: write data.path=..., see zbpp train --",
        ),
        ("run_dir=???", "run_dir: no value is given, and it needs one: write run_dir=..."),
    ],
)
def test_a_mistake_in_an_argument_is_one_line_that_says_what_to_write(given, words):
    with pytest.raises(Exception, match=".") as caught:
        configs.Composed.of(composed(given))
    error = configs.composition_error(caught.value) or caught.value
    assert isinstance(error, ConfigError)
    assert words in str(error)
    assert "\n" not in str(error)


def test_a_class_of_the_users_takes_any_argument():
    configs.typed(composed("+model.anything=1"))


def test_a_typo_in_a_classs_name_names_the_module_and_what_it_has(tmp_path, monkeypatch):
    (tmp_path / "my_typo_file.py").write_text("import json\n\nclass MyModel: ...\n\ndef my_data(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(configs.ConfigError) as caught:
        configs.instantiate_node("model", {"_target_": "my_typo_file.MyModle"})
    assert str(caught.value) == (
        "model (my_typo_file.MyModle): module 'my_typo_file' has no attribute 'MyModle'; "
        "did you mean MyModel?"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        configs.ConfigError, match="there is no module my_typofile; did you mean my_typo_file?"
    ):
        configs.instantiate_node("model", {"_target_": "my_typofile.MyModel"})


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("steps=0: write more"), 2), (Refusal("rank 1 died of SIGKILL"), 1)]
)
def test_a_mistake_ends_with_2_a_failure_with_1_and_a_bug_with_its_traceback(
    monkeypatch, capsys, error, status
):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    # torch writes its rank before a traceback once this process has had a process group.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit, match=f"^{status}$"), command_line._ended_in_order():
        raise error
    assert capsys.readouterr().err == f"error: {error}\n"
    with pytest.raises(SystemExit, match="^1$"), command_line._ended_in_order():
        raise ZeroDivisionError
    assert capsys.readouterr().err.startswith("Traceback")
    monkeypatch.setenv("ZBPP_TRACEBACK", "1")
    with pytest.raises(type(error)), command_line._ended_in_order():
        raise error


# ---------------------------------------------------------------- under torchrun


def test_ranks_other_than_0_write_no_log(monkeypatch):
    assert command_line.arguments(["steps=3"]) == ["steps=3"]
    monkeypatch.setenv("RANK", "0")
    assert command_line.arguments(["steps=3"]) == ["steps=3"]
    monkeypatch.setenv("RANK", "1")
    assert command_line.arguments(["steps=3"]) == [
        "hydra/job_logging=none", "hydra/hydra_logging=none", "steps=3",
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_inside_torchrun_is_refused(monkeypatch, flag):
    assert command_line.arguments([flag]) == [flag]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="-m sweeps inside one torchrun job can't work"):
        command_line.arguments([flag, "seed=1,2"])


def test_an_interrupt_ends_in_one_line(capsys):
    """Ctrl-C in a run of one process printed 83 lines."""
    with pytest.raises(SystemExit) as ended, command_line._ended_in_order():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_an_interrupt_ends_a_command_without_ranks_in_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("zbpp.commands.plan.parsed", interrupted)
    assert zbpp_command(["plan", "zb_auto"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_help_on_a_choice_shows_its_keys_with_defaults_and_what_they_mean(tmp_path, monkeypatch, capsys):
    """Nothing showed them but the YAML files, which an installed package hides."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model_file.py").write_text("class Own:\n    def __init__(self, size, depth=3): pass\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text("# Mine.\n_target_: own_file.my_data\nshare: 0.5  # of all\n")
    command_line.run(print, "train", "what it does", ["--help", "model=huggingface", "data=chat"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for words in (
        "model.path=null a folder with config.json and safetensors",
        "model.config.num_hidden_layers=8",
        "model.layers_per_stage=null [4,2], or auto: for parallel.speeds and memory.limit",
        "data.held_out=0.05 the share that is evaluated on",
        "steps=100",
    ):
        assert words.split() in lines
    own = ["model._target_=own_model_file.Own", "data=mine", "--config-dir", str(tmp_path), "-h"]
    command_line.run(print, "train", "what it does", own)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {"Keys of model=own_model_file.Own:", "model.size=???", "model.depth=3", "Mine."} <= set(lines)
    assert "data.share=0.5                     of all" in lines
    command_line.run(print, "train", "what it does", ["--help"])
    assert "Keys of" not in capsys.readouterr().out


# ---------------------------------------------------------------- a run's keys, and those of another command


def test_a_saved_config_composes_to_the_same_config_again(tmp_path):
    """It was no config of Hydra's: AttributeError, a dict has no attribute parallel."""
    first = configs.Composed.of(composed("steps=7", "model=llama_tiny", "schedule=zb_v", "run_dir=here"))
    (tmp_path / "config.yaml").write_text(first.yaml)
    assert configs.read_run_config(tmp_path / "config.yaml")["steps"] == 7
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        again = configs.Composed.of(compose("config"))
        other = configs.Composed.of(compose("config", overrides=["run_dir=there", "schedule.name=1f1b"]))
    assert again.tree == first.tree
    assert again.settings == first.settings
    assert (other.tree.run_dir, other.tree.schedule.name, other.tree.steps) == ("there", "1f1b", 7)


def test_a_runs_folder_stands_for_its_keys(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}")
    folder, again = str(tmp_path), ["--config-dir", str(tmp_path), "--config-name", "config"]
    goes_on = [f"run_dir={folder}", "resume=auto", "steps=9"]
    assert command_line.arguments([folder, "steps=9"]) == [*goes_on, *again]
    assert command_line.arguments(["run_dir=new", folder]) == ["run_dir=new", *again]
    assert command_line.arguments(again) == again


@pytest.mark.parametrize("command", ["measure", "bench", "explain"])
def test_keys_of_train_are_left_out_by_name_in_other_commands(command, capsys):
    given = ["model=mlp", "data=regression", "steps=9", "optimizer=lion", "optimizer.build.lr=1e-4", "seed=2"]
    kept = command_line.arguments([*given, "parallel.device=cpu"], command)
    assert kept[:3] == ["model=mlp", "data=regression", "seed=2"]
    assert ("device=cpu" in kept) == (command != "explain")
    said = capsys.readouterr().err
    assert "steps, optimizer, optimizer.build.lr" in said
    assert command_line.arguments(["stepz=9"], command) == ["stepz=9"]  # which Hydra refuses


@pytest.mark.parametrize("command", ["measure", "bench", "explain"])
def test_a_whole_line_of_train_composes_for_another_command(command):
    """-n was no option of explain, and mixed_bfloat16 no precision of the others."""
    given = [
        "-n",
        "2",
        "model=mlp",
        "data=regression",
        "schedule=zb_v",
        "precision=mixed_bfloat16",
        "steps=9",
    ]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        found = configs.typed(compose(command, overrides=command_line.arguments(given, command)))
    assert found.precision == "bfloat16"
    assert getattr(found, "num_ranks", 2) == 2


def test_a_saved_config_without_types_is_refused_by_what_it_lacks():
    """Another version's: StopIteration."""
    with pytest.raises(ConfigError, match="must begin with `defaults"):
        configs.Composed.of(OmegaConf.create({"model": {}}))
