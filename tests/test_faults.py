"""scripts/dev/chaos.py: real jobs are killed, stopped and damaged, also while they save; no step differs."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "dev"))

from chaos import STEPS, Setting, chaos, difference, drawn, reference  # noqa: E402
from faults import KINDS, warm_python  # noqa: E402


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_after_each_kind_of_fault_a_run_has_the_curve_of_the_run_without_any(tmp_path):
    steps = STEPS * (len(KINDS) + 1)
    faults = drawn(len(KINDS), steps, seed=0)
    with closing(warm_python()) as warm:
        setting = Setting(warm.bin, Path(sys.executable).parent, num_ranks=2, timeout=15, steps=steps)
        whole = reference(setting, tmp_path / "whole")
        events = chaos(setting, faults, 0, tmp_path / "chaos", whole)
    assert {event.fault for event in events} == KINDS.keys()
    assert [(event.fault, event.problems) for event in events if event.problems] == []
    # The comparison can fail.
    other = [(step, loss, norm * (1 + 2**-52) if step == 30 else norm) for step, loss, norm in whole]
    assert difference(other, whole) == [f"another curve: {steps} lines, {steps - 1} of {steps} equal"]


def test_a_chaos_has_all_its_faults_in_order_and_is_drawn_from_its_seed():
    faults = drawn(30, 900, seed=3)
    steps = [step for step, _ in faults]
    assert len(faults) == 30
    assert steps == sorted(set(steps))
    assert steps[-1] < 900
    assert {name for _, name in faults} <= KINDS.keys()
    assert drawn(30, 900, seed=3) == faults != drawn(30, 900, seed=4)
