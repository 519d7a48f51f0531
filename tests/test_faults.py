"""scripts/dev/bench_faults.py and chaos.py in small: real jobs are killed and damaged; no step differs."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "dev"))

from faults.case import Setting, reference, run_case  # noqa: E402
from faults.chaos import chaos, drawn, problems_of  # noqa: E402
from faults.job import curve_of  # noqa: E402
from faults.kinds import KINDS  # noqa: E402


@pytest.mark.slow
def test_after_faults_a_run_has_the_curve_of_the_run_without_them(warm, tmp_path):
    bin = warm.python.parent
    # A generous timeout: how soon a fault is noticed is for the script to say, on a quiet machine.
    setting = Setting(bin, bin, num_ranks=2, timeout=60, steps=32)
    whole = reference(setting, tmp_path / "whole")
    row = run_case("exception in B", 0, setting, whole, tmp_path / "one")
    assert row.problems == []
    assert row.recovered.startswith("started again: from step ")
    faults = [(9, "flipped bit in the newest checkpoint"), (18, "SIGTERM of the job")]
    events = chaos(setting, faults, 0, tmp_path / "chaos", lambda event: None)
    run = tmp_path / "chaos" / "run"
    assert [event.fault for event in events] == [name for _, name in faults]
    assert problems_of(events, setting, run, whole) == []
    assert len(curve_of(run)) == setting.steps
    # The comparison can fail.
    other = [(step, loss, norm * (1 + 2**-52) if step == 30 else norm) for step, loss, norm in whole]
    assert "another curve: 32 lines, 31 of 32 equal" in problems_of(events, setting, run, other)
    late = [replace(each, gone_after=66.0) for each in events]
    assert len(problems_of(late, setting, run, whole)) == 2


def test_a_chaos_has_all_its_faults_in_order_and_is_drawn_from_its_seed():
    faults = drawn(30, 900, seed=3)
    steps = [step for step, _ in faults]
    assert len(faults) == 30
    assert steps == sorted(set(steps))
    assert steps[-1] < 900
    assert {name for _, name in faults} <= KINDS.keys()
    assert drawn(30, 900, seed=3) == faults != drawn(30, 900, seed=4)
