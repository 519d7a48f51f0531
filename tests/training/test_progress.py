"""What a run shows: a bar or lines, with bubble, memory and the time that remains."""

import io

import torch
from rich.console import Console
from rich.text import Text

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
    _, first = line.of({"step": 1, "loss": 2.0, **MEASURED})
    assert first == "loss 2.0000  bubble 25.0 % (predicted 20.0 %)  memory 3.00 GiB  measured: steps 2-3"
    assert line.of({"step": 1, "loss": 1.0})[1] == first.replace("2.0000", "1.0000")


def test_the_remaining_time_is_that_of_the_steps_since_the_first():
    """A resumed run begins with step 101; what a step takes is counted from there."""
    now = iter([100.0, 102.0, 104.0])
    line = _Line(110, clock=lambda: next(now))
    texts = [line.of({"step": step, "loss": 1.0}) for step in (101, 102, 103)]
    assert texts == [("", "loss 1.0000"), ("ETA 0:00:16", "loss 1.0000"), ("ETA 0:00:14", "loss 1.0000")]


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(capsys):
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=120)
        with progress(4, shown=True, print_every=2, title="zb_h1", first=1, console=console) as show:
            for step in (2, 3, 4):
                show({"step": step, "loss": 0.5})
        assert ("4/4" in out.getvalue()) is is_terminal
    assert capsys.readouterr().out.splitlines()[0] == "zb_h1  step 2/4  loss 0.5000"


def test_80_columns_hold_step_time_left_and_bar_however_many_steps_were_measured():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    measured = {**MEASURED, "measured_steps": "steps 2-3, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000"}
    title = "zb_auto, replanned from zb_h1"
    with progress(20000, shown=True, print_every=1, title=title, console=console) as show:
        for step in (1001, 1002):
            show({"step": step, "loss": 0.5, "tokens_per_second": 123456.0, **measured})
    shown = Text.from_ansi(out.getvalue()).plain.splitlines()
    last = [line for line in shown if "1002/20000" in line][-1]
    assert len(last) <= 80
    assert last.startswith(title)
    assert all(word in last for word in ("━", "ETA ", "loss 0.5"))


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
