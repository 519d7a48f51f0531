"""Every command of docs/training.md runs, from an empty folder, and does what the page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("my_file.py", "load.py", "chain.py", "traced.py")
PAGE = (ROOT / "docs/training.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)  # opening and closing in pairs
    return [text for marked, text in found if marked == language]


def test_no_command_takes_more_than_two_lines() -> None:
    assert max(len(block.strip().splitlines()) for block in blocks("bash")) <= 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_new_users_path_from_an_empty_folder(tmp_path: Path) -> None:
    """Four ranks, one process and a searched plan have the same losses; accuracy is far above chance."""
    for name, text in zip(FILES, blocks("python"), strict=True):
        (tmp_path / name).write_text(text)
    _, *commands = blocks("bash")  # the first one installs
    commands.append("python load.py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "ZBPP": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        outputs.append(done.stdout)
    assert "equal to the last bit" in outputs[2]
    runs = [tmp_path / "runs" / name / "metrics.jsonl" for name in ("four_ranks", "one_process", "planned")]
    losses = [[json.loads(line)["loss"] for line in run.read_text().splitlines()] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 60
    assert losses[0][-1] < losses[0][0] / 2
    for output in (outputs[0], outputs[1], outputs[6]):
        assert float(re.findall(r"accuracy (\d\.\d+)", output)[-1]) > 0.5  # chance: .1
    for output in outputs[-3:-1]:
        first, *_, last = (float(line.split()[1]) for line in output.splitlines() if line[:1].isdigit())
        assert last < first
