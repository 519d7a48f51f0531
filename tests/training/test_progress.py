"""What a run shows: a bar or lines, with bubble, memory and the time that remains."""

import io

import torch
from rich.console import Console

from helpers.trainers import small_trainer
from zbpp.job.world import World
from zbpp.training.loggers import _Line, progress
from zbpp.training.measured_steps import LiveFigures

MEASURED = {
    "measured_steps": "steps 2-3",
    "measured_bubble_rate": 0.25,
    "predicted_bubble_rate": 0.2,
    "peak_memory_bytes": 3 * 2**30,
}


def test_the_figures_of_a_measured_step_stay_until_the_next_one():
    line = _Line(10, clock=lambda: 0.0)
    first = line.of({"step": 1, "loss": 2.0, **MEASURED})
    assert first == "loss 2.0000  bubble 25.0 % (predicted 20.0 %, steps 2-3)  memory 3.00 GiB"
    assert line.of({"step": 1, "loss": 1.0}) == first.replace("2.0000", "1.0000")


def test_the_remaining_time_is_that_of_the_steps_since_the_first():
    """A resumed run begins with step 101; what a step takes is counted from there."""
    now = iter([100.0, 102.0, 104.0])
    line = _Line(110, clock=lambda: next(now))
    texts = [line.of({"step": step, "loss": 1.0}) for step in (101, 102, 103)]
    assert texts == ["loss 1.0000", "loss 1.0000  ETA 0:00:16", "loss 1.0000  ETA 0:00:14"]


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(capsys):
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=120)
        with progress(4, shown=True, print_every=2, title="zb_h1", first=1, console=console) as show:
            for step in (2, 3, 4):
                show({"step": step, "loss": 0.5})
        assert ("4/4" in out.getvalue()) is is_terminal
    assert capsys.readouterr().out.splitlines()[0] == "zb_h1  step 2/4  loss 0.5000"


def test_measured_steps_have_their_bubble_and_memory_in_the_metrics():
    """The second and third step, one of four, and the last one."""
    figures = LiveFigures(World(0, 1, torch.device("cpu")), torch.float32)
    trainer = small_trainer(callbacks=[figures], num_recorded=1, record_every=4)
    steps = list(trainer.run(8))
    measured = [metrics["step"] for metrics in steps if "measured_bubble_rate" in metrics]
    assert measured == [2, 3, 5, 8]
    assert [metrics["measured_steps"] for metrics in steps if metrics["step"] in measured] == [
        "step 2", "steps 2-3", "steps 2-3, 5", "steps 2-3, 5, 8",
    ]  # fmt: skip
    assert all(0 <= metrics["predicted_bubble_rate"] < 1 for metrics in steps if metrics["step"] in measured)
    assert steps[1]["peak_memory_bytes"] > 2**20
