"""What the Hydra scripts make of their arguments, their help, and a mistake in them: one line."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from zbpp import command_line
from zbpp import config as configs
from zbpp.launch import Refusal

FOLDER = Path(__file__).parent.parent / "configs"
SCRIPTS = ("train", "bench", "measure", "explain")

configs.register()


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


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
    assert composed(*given).data == {"_target_": "my_file.batches", "rows": 3}


def test_a_target_beside_a_chosen_model_keeps_that_models_keys():
    config = composed("model=mlp", "model._target_=my_file.MyMlp", "data=regression")
    assert config.model == {**composed("model=mlp", "data=regression").model, "_target_": "my_file.MyMlp"}


def test_a_model_chosen_as_custom_takes_any_key():
    given = ["model=custom", "model._target_=my_file.Tower", "model.depth=3", "data=regression"]
    assert composed(*given).model == {"_target_": "my_file.Tower", "depth": 3}


def test_unknown_keys_of_other_models_are_still_refused():
    with pytest.raises(Exception, match="num_layerz") as caught:
        composed("model.num_layerz=3")
    assert "num_layerz" in str(configs.composition_error(caught.value))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("ZB_H1", "zb_h1"), ("1F1B", "1f1b"), ("ZBVZeroBubble", "zb_v"), ("zb_h1", "zb_h1"),
        ("Interleaved1F1B", "interleaved_1f1b"), ("InterleavedZeroBubble", "interleaved_zb"),
        ("LoopedBFS", "looped_bfs"), ("DualPipeV", "dualpipe_v"),
    ],
)  # fmt: skip
def test_a_schedule_goes_by_any_case_and_by_torchs_name(written, name):
    assert composed(f"schedule={written}").schedule.name == name


def test_a_sweep_over_schedules_takes_the_same_names():
    assert command_line.arguments(["-m", "schedule=ZB_H1,AUTO,mine"]) == ["-m", "schedule=zb_h1,auto,mine"]


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_groups_that_the_script_takes_with_all_choices_and_no_other(script):
    """bench.py --help listed schedule, optimizer, logger, ... and refused each of them."""
    text = command_line.help_text(script, "what it does")
    shown = dict(re.findall(r"^(\w+)=\w+.*\n    (.*)$", text, flags=re.M))
    for group in (path.name for path in FOLDER.iterdir() if path.is_dir()):
        files = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
        if group in shown:
            assert shown[group].split(", ") == files
            continue
        with pytest.raises(Exception, match="Could not override") as caught:
            composed(f"{group}={files[0]}", name=script)
        assert configs.composition_error(caught.value) is not None


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_every_value_of_the_script(script):
    text = command_line.help_text(script, "what it does")
    config = composed(name=script)
    plain = [key for key in config if not configs.OmegaConf.is_dict(config._get_node(key))]
    assert [key for key in plain if f"\n{key}: " not in text] == []


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("model=gpt_tony", "Could not find 'model/gpt_tony' Available options in 'model': custom emulated"),
        ("stepz=3", "Could not override 'stepz'. Key 'stepz' not in 'TrainConfig'; did you mean steps"),
        ("steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
        ("steps=[3", "no viable alternative at input '[3'"),
    ],
)
def test_what_hydra_says_of_a_mistake_is_one_line(given, words):
    with pytest.raises(Exception, match=".") as caught:
        composed(given)
    error = configs.composition_error(caught.value)
    assert words in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("+step=2", "step: there is no such key; did you mean steps?"),
        (
            "++optimizer.learning_rat=1",
            "optimizer.learning_rat: there is no such key; did you mean learning_rate?",
        ),
        ("+parallel.ranks=2", "parallel.ranks: there is no such key; did you mean num_ranks?"),
        ("+schedule.nmae=gpipe", "schedule.nmae: there is no such key; did you mean name?"),
        ("+lr=.5", "lr: there is no such key"),
    ],
)
def test_a_key_added_with_a_plus_was_read_by_nobody_in_silence(given, message):
    with pytest.raises(configs.ConfigError) as caught:
        configs.typed(composed(given))
    assert str(caught.value) == message
    configs.typed(composed("+model.anything=1"))  # a class of the user's may take it


def test_a_mistake_ends_the_process_with_one_line_and_a_bug_with_its_traceback(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit) as ended, command_line._one_line():
        raise configs.ConfigError("steps=0: write more")
    assert ended.value.code == "error: steps=0: write more"
    with pytest.raises(ZeroDivisionError), command_line._one_line():
        raise ZeroDivisionError
    monkeypatch.setenv("ZBPP_TRACEBACK", "1")
    with pytest.raises(configs.ConfigError), command_line._one_line():
        raise configs.ConfigError("steps=0: write more")


# ---------------------------------------------------------------- under torchrun


@pytest.mark.parametrize("given", ["optimizer=null", "optimizer=3", "model=", "data=True", "logger=1e3"])
def test_a_choice_that_no_file_can_be_called_was_a_traceback_of_hydras(given):
    with pytest.raises(Refusal, match=f"{re.escape(given)}: choose one of [a-z]"):
        command_line.arguments([given])
    assert command_line.arguments(["schedule=1f1b", "model.seed=3"]) == ["schedule=1f1b", "model.seed=3"]


def test_ranks_other_than_0_write_no_log(monkeypatch):
    assert command_line.arguments(["steps=3"]) == ["steps=3"]
    monkeypatch.setenv("RANK", "0")
    assert command_line.arguments(["steps=3"]) == ["steps=3"]
    monkeypatch.setenv("RANK", "1")
    assert command_line.arguments(["steps=3"]) == [
        "steps=3", "hydra/job_logging=none", "hydra/hydra_logging=none",
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_inside_torchrun_is_refused(monkeypatch, flag):
    assert command_line.arguments([flag]) == [flag]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(Refusal, match="-m sweeps inside one torchrun job can't work"):
        command_line.arguments([flag, "seed=1,2"])
