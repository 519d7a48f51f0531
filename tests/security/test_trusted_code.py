"""A config file runs no code but zbpp's and torch's, unless the user types that it may."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from zbpp import config as configs
from zbpp.commands import command_line
from zbpp.config import ConfigError, Trust, instantiate_node, read_run_config
from zbpp.config.known_code import resolved

HARMFUL = [
    "os.system", "pathlib.Path.write_text", "pandas.read_pickle", "numpy.load", "subprocess.run",
    "builtins.eval", "shutil.rmtree", "importlib.import_module", "my_file.Model",
    # Within torch and zbpp, or through them.
    "torch.load", "torch.hub.load", "torch.save", "torch.jit.load", "torch.utils.cpp_extension.load",
    "torch.os.system", "torch.utils.data.dataloader.os.system", "torch.nn.modules.module.functools.partial",
    "torch.utils.data._utils.worker.os.kill", "torch.optim.optimizer.torch.load",
    "torch.utils.data.datapipes.iter.FileOpener", "torch.utils.data.datapipes.utils.common.os.system",
    "torch.nn.parallel.DistributedDataParallel", "torch.nn.Module.__init__", "torch.nn.functional.F",
    "torch.optim.swa_utils.AveragedModel", "torch.fx.GraphModule", "torch.nn.init.warnings.sys.exit",
    "zbpp.models.hf.Path.write_text", "zbpp.data.text.Path.unlink", "zbpp.data.prepare.shutil.rmtree",
    "zbpp.data.prepare.prepare", "zbpp.data.prepare.glob.glob", "zbpp.models.hf.export.write_folder",
    "zbpp.run.export.export", "zbpp.train.main", "optimi.os.system", "optimi.torch.load",
    "torch.nn", "torch", "", "torch.nn.Linear ", "torch..nn.Linear", "torch.nn.__builtins__",
]  # fmt: skip
HARMLESS = [
    "torch.nn.Linear", "torch.nn.CrossEntropyLoss", "torch.optim.SGD", "torch.optim.AdamW",
    "torch.optim.lr_scheduler.StepLR", "torch.utils.data.TensorDataset", "optimi.StableAdamW",
    "zbpp.models.gpt.Gpt", "zbpp.models.hf.HuggingFace", "zbpp.data.text_data", "zbpp.data.token_data",
    "zbpp.data.regression_data", "zbpp.data.chat.chat_data", "zbpp.models.emulated.Emulated",
]  # fmt: skip


def is_made_from_a_file(target):
    """Whether a config file that names the target would get as far as calling it."""
    try:
        Trust().check({"model": {"_target_": target}})
        resolved(target)
    except (ConfigError, ImportError, ValueError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("target", HARMFUL)
def test_no_config_file_calls_harmful_code(target):
    assert not is_made_from_a_file(target)


@pytest.mark.parametrize("target", HARMLESS)
def test_zbpps_models_and_data_and_torchs_layers_and_optimizers_need_no_trust(target):
    assert is_made_from_a_file(target)


def test_each_target_of_our_configs_needs_no_trust():
    files = sorted(configs.config_folder().rglob("*.yaml"))
    lines = [line for path in files for line in path.read_text().splitlines()]
    targets = [line.partition(":")[2].split()[0] for line in lines if line.startswith("_target_: ")]
    assert len(targets) > 10
    for target in set(targets) - {"???"}:
        assert is_made_from_a_file(target)


def test_even_a_typed_name_does_not_lead_through_torch_to_other_code():
    for target in ("torch.os.getcwd", "torch.hub.list", "zbpp.data.prepare.prepare"):
        with pytest.raises(ConfigError, match=r"data \(.*\): it is no model, layer, optimizer, .* my_file"):
            instantiate_node("data", {"_target_": target})


@pytest.mark.parametrize(
    ("typed", "key", "target"),
    [
        ("model._target_=my_file.Tower", "model", "my_file.Tower"),
        ("++model._target_=my_file.Tower", "model", "my_file.Tower"),
        ("model._target_=my_file.A,my_file.Tower", "model", "my_file.Tower"),
        ("model._target_='my_file.Tower','my_file.A'", "model", "my_file.Tower"),
        ("optimizer.build={_target_: my_file.Sgd, lr: 1}", "optimizer.build", "my_file.Sgd"),
        ("data={parts: [{_target_: my_file.Part}]}", "data.parts.0", "my_file.Part"),
    ],
)
def test_a_name_that_the_user_types_is_trusted_at_its_key_only(typed, key, target):
    def config(name, key=key):
        node = {"_target_": name}
        for each in reversed(key.split(".")):
            node = [node] if each == "0" else {each: node}
        return node

    trust = Trust.typed(["steps=3", typed, "--config-dir", "conf"])
    trust.check(config(target))
    assert trust.names_own_code
    with pytest.raises(ConfigError, match=r"_target_=my_file.Other is code that a config file names"):
        trust.check(config("my_file.Other"))
    with pytest.raises(ConfigError, match=r"other._target_=my_file\.\w+ is code .* type .*trust_code=true"):
        trust.check(config(target, "other"))
    assert not Trust.typed(["model=mlp", "model._target_=zbpp.models.mlp.Mlp"]).names_own_code


def test_trust_code_counts_in_the_command_only():
    evil = {"model": {"_target_": "os.getcwd"}}
    for typed in ("trust_code=true", "trust_code=True", "++trust_code=true"):
        Trust.typed([typed]).check({**evil, "trust_code": True})
    for typed in ([], ["trust_code=false"], ["trust_code=true", "trust_code=false"], ["steps=1"]):
        with pytest.raises(ConfigError):
            Trust.typed(typed).check(evil)
    for given in (True, "true"):
        with pytest.raises(ConfigError, match="trust_code=true counts in the command only"):
            Trust().check({"trust_code": given})


def test_a_text_that_looks_like_an_interpolation_stays_a_text():
    """Hydra's instantiate resolved it again, after the check: `${oc.create:...}` could become a node."""
    node = {"_target_": "torch.nn.Softmax", "dim": "${oc.create:'{_target_: os.getcwd}'}"}
    made = instantiate_node("model", node)
    assert isinstance(made, nn.Softmax)
    assert made.dim == node["dim"]


def test_nodes_inside_a_node_are_made_first_and_judged_alike():
    inner = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    node = {"_target_": "torch.nn.TransformerDecoder", "decoder_layer": inner, "num_layers": 1}
    assert isinstance(instantiate_node("model", node).layers[0], nn.Linear)
    partial = instantiate_node("model", {**inner, "_partial_": True})
    assert partial().out_features == 3
    assert instantiate_node("model", {"_target_": "torch.nn.Linear", "_args_": [4, 5]}).in_features == 4
    with pytest.raises(ConfigError, match=r"model.decoder_layer\[0\] \(torch.hub.load\): it is no model"):
        instantiate_node("model", {**node, "decoder_layer": [{"_target_": "torch.hub.load"}]})


# ---------------------------------------------------------------- somebody's folder of configs

MARK = "import pathlib\n\npathlib.Path(r'{}').touch()\n\ndef run(*args, **kwargs): ...\n"
ATTACKS = {
    "a target": "_target_: evil.run\n",
    "a target in a target": "_target_: zbpp.models.mlp.Mlp\nloss: [{_target_: evil.run}]\n",
    "an interpolated target": "_target_: ${.name}\nname: evil.run\n",
    "a node from a resolver": "_target_: zbpp.models.mlp.Mlp\nloss: ${oc.create:'{_target_: evil.run}'}\n",
    "a logging handler": "# @package hydra.job_logging\nhandlers:\n  console: {(): evil.run}\n",
    "Hydra's own log": "# @package hydra.hydra_logging\nhandlers:\n  console: {(): evil.run}\n",
    "a callback": "# @package _global_\nhydra:\n  callbacks:\n    mine:\n      _target_: evil.run\n",
    "a launcher": "# @package hydra\nlauncher:\n  _target_: evil.run\n",
    "the environment": "# @package _global_\nhydra:\n  job:\n    env_set: {PYTHONSTARTUP: evil.py}\n",
    "trust": "# @package _global_\ntrust_code: true\nmodel: {_target_: evil.run}\n",
    "a variable of the environment": "_target_: zbpp.models.mlp.Mlp\nsecret: ${oc.env:SECRET}\n",
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    "a node in itself": "a: &a [*a]\n",
    "depth": f"a: {'[' * 5000}\n",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("flags", [[], ["-m"], ["--cfg", "all"]], ids=["run", "sweep", "show"])
def test_a_folder_of_configs_runs_no_code(monkeypatch, tmp_path, capsys, attack, flags):
    """In this process, with the module of the attack on the path; --cfg may print what it would refuse."""
    reached = tmp_path / "reached"
    (tmp_path / "evil.py").write_text(MARK.format(reached))
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text(ATTACKS[attack])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "the secret")
    monkeypatch.setattr(sys, "argv", sys.argv)
    ran, told = [], ""
    given = ["--config-dir", "conf", "model=mine", "data=regression", *flags]
    try:
        command_line.run(ran.append, "explain", "", given)
    except SystemExit as ended:
        told = str(ended)
    assert "Traceback" not in told
    assert len(told) < 800
    assert "the secret" not in told
    assert not reached.exists()
    assert not ran
    assert "evil" not in sys.modules
    assert "the secret" not in capsys.readouterr().out


PLACES = {  # of a config that --config-name names: what the refusal says
    "hydra:\n  searchpath: [pkg://evil_configs]\n": "sets hydra.searchpath, which can run code",
    "hydra:\n  searchpath: ${.more}\n  more: [pkg://evil_configs]\n": "sets hydra.searchpath",
    "defaults: [explain, model: circle, _self_]\n": "the defaults of config files lead .* in a circle",
    "defaults: [explain, model: linked/bomb, _self_]\n": "aliases .* stand for too many values",
}


@pytest.mark.parametrize("config", PLACES)
def test_a_config_leads_to_no_package_no_circle_and_no_bomb(monkeypatch, tmp_path, config):
    """Hydra imports a package of its search path while it composes: before anything can be checked."""
    reached = tmp_path / "reached"
    for name in ("conf/model", "hidden", "evil_configs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "evil_configs/__init__.py").write_text(MARK.format(reached))
    # A name that looks like the key allows nothing.
    (tmp_path / "conf/my_hydra.searchpath.yaml").write_text(config)
    (tmp_path / "conf/model/circle.yaml").write_text("defaults: [back]\n")
    (tmp_path / "conf/model/back.yaml").write_text("defaults: [circle]\n")
    if "linked" in config:
        (tmp_path / "hidden/bomb.yaml").write_text(ATTACKS["aliases"])
        (tmp_path / "hidden/around").symlink_to(tmp_path / "conf")
        (tmp_path / "conf/model/linked").symlink_to(tmp_path / "hidden")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    ran = []
    given = [
        "--config-path",
        str(tmp_path / "conf"),
        "--config-name",
        "my_hydra.searchpath",
        "data=regression",
    ]
    with pytest.raises(SystemExit, match=PLACES[config]):
        command_line.run(ran.append, "explain", "", given)
    assert not ran
    assert not reached.exists()
    assert "evil_configs" not in sys.modules


def test_trust_code_lets_a_folder_of_configs_name_code(monkeypatch, tmp_path):
    reached = tmp_path / "reached"
    (tmp_path / "friend.py").write_text(MARK.format(reached) + "class Model: ...\n")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: friend.Model\nuser: ${oc.env:SECRET}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "known")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran = []
    given = ["--config-dir", "conf", "model=mine", "data=regression"]
    with pytest.raises(SystemExit, match=r"model._target_=friend.Model is code .*trust_code=true"):
        command_line.run(ran.append, "explain", "", [*given, "model.user=me"])
    assert str(tmp_path) not in sys.path
    command_line.run(ran.append, "explain", "", [*given, "trust_code=true"])
    assert ran[0].tree.model == {"_target_": "friend.Model", "user": "known"}
    assert sys.path[0] == str(tmp_path)
    Trust().guard_environment()  # as every command begins


def test_a_pickled_config_is_not_read(capsys):
    with pytest.raises(SystemExit, match="there is no option --experimental-rerun"):
        command_line.run(print, "explain", "", ["--experimental-rerun", "config.pickle"])


# ---------------------------------------------------------------- somebody's run


@pytest.mark.parametrize(
    "attack", ["a target", "an interpolated target", "aliases", "a node in itself", "depth"]
)
def test_the_config_of_a_run_names_no_code(tmp_path, attack):
    path = tmp_path / "config.yaml"
    text = ATTACKS[attack]
    path.write_text("model:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    with pytest.raises(ConfigError) as caught:
        read_run_config(path)
    assert len(str(caught.value)) < 600
    if attack == "a target":
        assert "model._target_=evil.run: if you trust this run, add --trust-code" in str(caught.value)
        assert read_run_config(path, trust_code=True)["model"] == {"_target_": "evil.run"}


def test_export_of_a_run_in_its_own_folder_imports_nothing_from_there(tmp_path):
    """With the current folder first on the path, a wandb.py or yaml.py there ran in place of the package."""
    reached = tmp_path / "reached"
    for name in ("yaml", "transformers", "safetensors", "evil"):
        (tmp_path / f"{name}.py").write_text(MARK.format(reached))
    (tmp_path / "config.yaml").write_text("model: {_target_: evil.run}\n")
    script = "import sys; sys.path.remove(''); from zbpp.commands.export import main; main(['.', 'out'])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(Path(configs.__file__).parents[2]), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: config.yaml names code of its own, model._target_=evil.run" in done.stderr, done.stderr
    assert not reached.exists()
