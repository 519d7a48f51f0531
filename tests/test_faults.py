"""scripts/dev/chaos.py in small: real jobs are killed and damaged, also while they save; no step differs."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "dev"))

from chaos import Setting, chaos, difference, drawn, reference  # noqa: E402
from faults import KINDS  # noqa: E402


@pytest.mark.slow
def test_after_faults_a_run_has_the_curve_of_the_run_without_them(warm, tmp_path):
    bin = warm.python.parent
    # A generous timeout: how soon a fault is noticed is for the script to say, on a quiet machine.
    setting = Setting(bin, bin, num_ranks=2, timeout=60, steps=32)
    whole = reference(setting, tmp_path / "whole")
    faults = [
        (9, "truncated checkpoint"),
        (13, "exception in B"),
        (17, "kill in a save"),
        (22, "kill in a save"),
    ]
    events = chaos(setting, faults, 0, tmp_path / "chaos", whole)
    assert [event.fault for event in events] == [name for _, name in faults]
    assert [event.problems for event in events] == [[]] * len(faults)
    # The comparison can fail.
    other = [(step, loss, norm * (1 + 2**-52) if step == 30 else norm) for step, loss, norm in whole]
    assert difference(other, whole) == ["another curve: 32 lines, 31 of 32 equal"]


def test_a_chaos_has_all_its_faults_in_order_and_is_drawn_from_its_seed():
    faults = drawn(30, 900, seed=3)
    steps = [step for step, _ in faults]
    assert len(faults) == 30
    assert steps == sorted(set(steps))
    assert steps[-1] < 900
    assert {name for _, name in faults} <= KINDS.keys()
    assert drawn(30, 900, seed=3) == faults != drawn(30, 900, seed=4)
