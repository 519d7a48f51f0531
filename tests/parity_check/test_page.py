"""docs/parity.md: its cases run under torchrun, and its table lists what is named."""

import json
from pathlib import Path

import pytest
import torch

from helpers.pages import ROOT, blocks, run_command
from zbpp.parity_check import faults

PAGE = "docs/parity.md"
COMMAND, ON_TORCH = blocks(PAGE, "bash")
CASES = {text.splitlines()[0].removeprefix("# "): text for text in blocks(PAGE, "python")}


def write(folder: Path, name: str, *changes: tuple[str, str]) -> None:
    text = CASES[name]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline_case.py", "schedule_case.py", "loop_case.py"])
def test_a_case_of_the_page_is_equal(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    printed = run_command(COMMAND.replace("pipeline_case.py", name), tmp_path)
    assert printed.splitlines()[-1].startswith("EQUAL: ")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_equal"]
    assert max(report["checks"].values()) <= report["tolerance"]


@pytest.mark.slow
def test_the_mistake_that_the_page_shows_is_named_and_is_the_exit_status(tmp_path: Path) -> None:
    name = "loop_case.py"
    write(tmp_path, name, ("    dist.all_reduce(square)", "    # dist.all_reduce(square)"))
    command = COMMAND.replace("pipeline_case.py", name).strip()
    printed = run_command(f"{command}; test $? = 1", tmp_path)
    assert "NOT EQUAL: clipping of step 0 differs in 5 of 6" in printed or "in 6 of 6" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["cause"] == "one rank's norm in place of all ranks'"


@pytest.mark.slow
def test_faults_of_torchs_runtime_are_found_there_and_gone_on_zbpp(tmp_path: Path) -> None:
    write(tmp_path, "torch_case.py")
    of_torch, of_zbpp = ON_TORCH.strip().splitlines()
    printed = run_command(f"{of_torch} || true", tmp_path)
    if torch.__version__.startswith("2.13"):  # a later one may have mended them
        assert "a trained parameter has no gradient (6 of 6 differences)" in printed
    assert run_command(of_zbpp, tmp_path).splitlines()[-1].startswith("EQUAL: ")


def test_a_case_that_can_not_be_checked_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, "schedule_case.py", ('        "names"', '        # "names"'))
    command = COMMAND.replace("pipeline_case.py", "schedule_case.py").strip()
    printed = run_command(f"{command} 2>&1 | grep ^error; test ${{PIPESTATUS[0]}} != 0", tmp_path)
    assert printed.count("\n") == 1
    assert "rank 0 has weight, whole() does not" in printed


def test_the_page_lists_every_mistake() -> None:
    page = (ROOT / PAGE).read_text()
    for name, _ in (*faults._OTHER_WEIGHTS, *faults._OTHER_NORMS):
        shown = name.split(",")[0].split(":")[0].replace("first", "last")
        assert shown in page, name
