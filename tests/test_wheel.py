"""What `pip install` of the wheel brings, run from an empty folder: the command `zbpp`, types, configs."""

import os
import sys

import pytest

from helpers.installed import ROOT, start

COMMANDS = ("plan", "train", "bench", "measure", "explain", "compare")


@pytest.fixture
def zbpp(site):
    """The installed command."""
    if site == ROOT:
        pytest.skip("hatchling is not installed: pip install -e '.[dev]'")
    return str(site / "bin/zbpp")


def test_the_package_holds_its_types_and_all_configs(zbpp, site):
    assert (site / "zbpp/py.typed").is_file()
    files = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {path.relative_to(site / "zbpp") for path in (site / "zbpp/configs").rglob("*.yaml")} == files


def test_help_lists_every_command_in_a_line_and_version_is_the_packages(zbpp, site, tmp_path):
    script = (
        f"{zbpp} --help; {zbpp} --version; {sys.executable} -m zbpp zoom; "
        f"cd {tmp_path}; {sys.executable} -c 'import zbpp; print(zbpp.__file__)'"
    )
    text = start(tmp_path, ["bash", "-c", script], site).text
    lines = text.splitlines()
    for command in COMMANDS:
        assert sum(line.startswith(f"  {command} ") for line in lines) == 1
    assert lines[-3:] == [
        "zbpp 0.1.0",
        "error: unknown command 'zoom': write plan, train, bench, measure, explain or compare",
        str(site / "zbpp/__init__.py"),
    ]


def test_plan_needs_neither_torch_nor_hydra(zbpp, site, tmp_path):
    for name in ("torch", "hydra", "omegaconf"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    path = os.pathsep.join([str(tmp_path), str(site)])
    done = start(tmp_path, [zbpp, "plan", "zb_h1", "--ranks", "2"], site, PYTHONPATH=path)
    assert done.rc == 0, done.text
    assert "makespan 25 ms" in done.text


def test_commands_with_a_config_find_the_packaged_one_and_add_a_users_folder(zbpp, site, tmp_path):
    """Each command prints the config that it would run with: a user's model among the packaged choices."""
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: my_file.Tower\nhidden_size: 24\n")
    commands = ("train", "bench", "measure", "explain")
    script = " && ".join(
        f"{zbpp} {command} --config-dir conf model=mine data=regression --cfg job" for command in commands
    )
    done = start(tmp_path, ["bash", "-c", script], site)
    assert done.rc == 0, done.text
    assert done.text.count("_target_: my_file.Tower") == len(commands)
    assert done.text.count("_target_: zbpp.training.data.regression_data") == len(commands)
    assert {path.name for path in tmp_path.iterdir()} == {"conf"}


def test_explain_shows_a_stage_of_a_packaged_model(zbpp, site, tmp_path):
    given = ["model=mlp", "data=regression", "num_stages=2", "stage=1"]
    done = start(tmp_path, [zbpp, "explain", *given], site)
    assert done.rc == 0, done.text
    assert "computed in W: 8 of 8 parameters" in done.text
