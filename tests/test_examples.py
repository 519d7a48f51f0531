"""The programs of examples/ run as their first lines say, on two ranks, and learn."""

import re
from pathlib import Path

import pytest

from helpers.pages import ROOT, run_command

EXAMPLES = ROOT / "examples"
TRAIN = ("own_loop", "hugging_face_lora", "lengths", "slices")
BY_NIGHT = pytest.mark.nightly  # by day tests/test_docs_run.py trains adapters


def commands(name: str) -> list[str]:
    """The commands in the first lines of an example."""
    first = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    return [line for line in first.splitlines() if line.startswith(("torchrun", "python"))]


def run(command: str, folder: Path) -> str:
    return run_command(re.sub(r"(\w+\.py)", rf"{EXAMPLES}/\1", command), folder)


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *TRAIN,
        "parity_of_another_trainer",
        "plan_for_a_cluster",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=BY_NIGHT if name == "hugging_face_lora" else ()) for name in TRAIN]
)
def test_the_loss_of_an_example_falls(name: str, tmp_path: Path) -> None:
    printed = run(commands(name)[-1], tmp_path)
    losses = [float(each) for each in re.findall(r"^step \d+  loss (\S+)", printed, flags=re.M)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_parity_tells_the_wrong_trainer_from_the_right_one(tmp_path: Path) -> None:
    right, wrong = commands("parity_of_another_trainer")
    assert "EQUAL: the ranks compute what one process computes" in run(right, tmp_path)
    failing = run(f"! {wrong}", tmp_path)  # the exit status is not 0
    assert "one rank's norm in place of all ranks'" in failing


def test_the_plan_of_the_example_is_proved_optimal(tmp_path: Path) -> None:
    (command,) = commands("plan_for_a_cluster")
    printed = run(command, tmp_path)
    (found,) = re.findall(r"^zb_auto +(\S+)", printed, flags=re.M)
    assert f"takes less than {found} ms" in printed
