"""What `pip install` of the wheel brings, run from an empty folder: the command `zbpp`, types, configs."""

from importlib.metadata import version

import pytest

from helpers.installed import ROOT, Installation

COMMANDS = ("plan", "train", "bench", "measure", "memory", "explain", "export", "hang", "compare")


@pytest.fixture
def wheel(installed: Installation) -> Installation:
    if installed.pythonpath:
        pytest.skip("hatchling is not installed: pip install -e '.[dev]'")
    return installed


def packages(wheel):
    (found,) = wheel.python.parents[1].glob("lib/python*/site-packages")
    return found


def test_the_package_holds_its_types_and_all_configs(wheel):
    package = packages(wheel) / "zbpp"
    assert (package / "py.typed").is_file()
    files = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {path.relative_to(package) for path in (package / "configs").rglob("*.yaml")} == files


def test_the_command_lists_its_commands_and_knows_its_version(wheel, tmp_path):
    script = (
        f"{wheel.python.parent}/zbpp --help; {wheel.python} -m zbpp --version; {wheel.python} -m zbpp zoom; "
        f"{wheel.python} -c 'import zbpp; print(zbpp.__file__)'; {wheel.python} -c 'import scripts'"
    )
    lines = wheel.start(tmp_path, ["bash", "-c", script]).text.splitlines()
    for command in COMMANDS:
        assert sum(line.startswith(f"  {command} ") for line in lines) == 1
    assert f"zbpp {version('zbpp')}" in lines
    *names, last = COMMANDS
    assert f"error: unknown command 'zoom': write {', '.join(names)} or {last}" in lines
    assert str(packages(wheel) / "zbpp/__init__.py") in lines
    assert lines[-1] == "ModuleNotFoundError: No module named 'scripts'"  # the repository is not found


def test_plan_needs_neither_torch_nor_hydra(wheel, tmp_path):
    for name in ("torch", "hydra", "omegaconf"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    done = wheel.start(tmp_path, wheel.zbpp("plan", "zb_h1", "--ranks", "2"), PYTHONPATH=str(tmp_path))
    assert done.rc == 0, done.text
    assert "makespan 25 ms" in done.text


def test_commands_find_the_packaged_configs_and_add_a_users_folder(wheel, tmp_path):
    """Each command prints the config that it would run with: a user's model among the packaged choices."""
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: my_file.Tower\nhidden_size: 24\n")
    commands = ("train", "bench", "measure", "explain")
    given = "--config-dir conf model=mine data=regression --cfg job"
    script = " && ".join(f"{wheel.python} -m zbpp {command} {given}" for command in commands)
    done = wheel.start(tmp_path, ["bash", "-c", script])
    assert done.rc == 0, done.text
    assert done.text.count("_target_: my_file.Tower") == len(commands)
    assert done.text.count("_target_: zbpp.data.regression_data") == len(commands)
    assert {path.name for path in tmp_path.iterdir()} == {"conf"}


def test_explain_shows_a_stage_of_a_packaged_model(wheel, tmp_path):
    given = ["model=mlp", "data=regression", "num_stages=2", "stage=1"]
    done = wheel.start(tmp_path, wheel.zbpp("explain", *given))
    assert done.rc == 0, done.text
    assert done.text.count(" W ") == 8  # all of its parameters are computed in W


def test_ranks_run_the_installed_zbpp_and_the_users_file_whatever_lies_beside_them(wheel, tmp_path):
    """Ranks imported a zbpp of the current folder, which stands first in sys.path for the user's classes.

    A user's file comes before an installed module of its name, on the ranks as in the first process.
    """
    (tmp_path / "zbpp.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "own.py").write_text("from zbpp.models.mlp import Mlp\n")
    installed = packages(wheel) / "own.py"
    installed.write_text("raise SystemExit(4)\n")
    given = ["train", "-n", "2", "model=mlp", "model._target_=own.Mlp", "data=regression", "steps=1"]
    try:
        done = wheel.start(tmp_path, [f"{wheel.python.parent}/zbpp", *given, "run_dir=run"])
    finally:
        installed.unlink()
    assert done.rc == 0, done.text
    assert (tmp_path / "run/summary.json").is_file()
