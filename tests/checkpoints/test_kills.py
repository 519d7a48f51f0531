"""Runs that are killed while they save lose nothing. The script does it 20 times, with four processes."""

import re
import subprocess
import sys

import pytest

from helpers.pages import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_while_it_saves_goes_on_as_if_nothing_had_happened():
    command = [
        sys.executable,
        "scripts/dev/kill_saves.py",
        "--kills=2",
        "--ranks=2",
        "--every=2",
        "--hidden=64",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A fast machine may have ended the run before the second kill.
    said = r"[12] kills; 16 steps, each once, losses and norms equal to the last bit"
    assert re.fullmatch(said, done.stdout.splitlines()[-1])
