"""`zbpp compare`: what it says of finished runs."""

import json
import math

import pytest

from zbpp.commands import compare

SUMMARY = {
    "schedule": "zb_h1", "loss": 0.5, "rows_per_second": 1234.0, "predicted_bubble_rate": 0.1,
    "measured_bubble_rate": 0.2,
}  # fmt: skip


def run(folder, *losses, **figures):
    """The folder of a finished run with these losses."""
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **figures}))
    rows = [each if isinstance(each, dict) else {"loss": each} for each in losses]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_runs_are_called_by_their_folders_and_show_what_was_measured(monkeypatch, tmp_path, capsys):
    run(tmp_path / "a", 0.5, evaluation_loss=0.25, measured_steps="steps 2-3, 7")
    run(tmp_path / "b", 0.5, replanned_from="1f1b")
    monkeypatch.chdir(tmp_path)
    assert compare.main(["a", "b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert lines == [
        ["a", "zb_h1", "0.5", "0.2500", "1,234", "rows/s", "10.0", "%", "20.0", "%", "steps", "2-3,", "7"],
        ["b", "zb_h1", "(began", "as", "1f1b)", "0.5", "-", "1,234", "rows/s", "10.0", "%", "20.0", "%", "-"],
    ]


def test_conditions_that_differ_come_first(tmp_path, capsys):
    same = {"torch": "2.13.0", "python": "3.11.2", "precision": "float32"}
    one = run(tmp_path / "a", 0.5, threads=2, device="2 CPU cores (AVX2)", **same)
    other = run(tmp_path / "b", 0.25, threads=1, device="2 CPU cores (AVX2)", **same)
    assert compare.main([one, other]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the runs differ in threads, so their losses may: 2, 1"
    assert lines[1].startswith("run ")
    compare.main([one, one])
    assert capsys.readouterr().out.startswith("run ")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([0.5, 0.5], "DIFFER, first in step 2; the largest difference is 1.0e+00 of a loss"),
        ([0.5, 0.25 * (1 + 2**-52)], "is 2.2e-16 of a loss"),
        ([0.5], "DIFFER: the runs have 2 and 1 steps"),
        ([0.5, math.nan], "DIFFER, first in step 2\n"),
    ],
)
def test_it_says_where_losses_differ_and_by_how_much(tmp_path, capsys, second, said):
    assert compare.main([run(tmp_path / "a", 0.5, 0.25), run(tmp_path / "b", *second)]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "a is one run: name two run folders or more to compare, or --picture FILE\n"),
        (["{}/.."], ".. holds no summary.json: name the run_dir of a finished zbpp train\n"),
        (["nowhere"], "error: there is no folder nowhere\n"),
        (["runs/u_*"], "error: nothing matches runs/u_*\n"),
    ],
)
def test_what_can_not_be_compared_is_refused(tmp_path, capsys, more, said):
    """For a single run the command said that "the losses are equal to the last bit"."""
    folder = run(tmp_path / "a", 0.5)
    with pytest.raises(SystemExit, match="^2$"):
        compare.main([folder, *(each.format(folder) for each in more)])
    assert capsys.readouterr().err.endswith(said)


def test_one_run_or_several_are_drawn(tmp_path, capsys):
    """Each run is a line of the picture; a loss that is not finite leaves a gap."""
    rows = [
        {"step": step, "loss": loss, "tokens_per_second": 9.0} for step, loss in enumerate((2.0, "NaN", 1.0))
    ]
    rows[2] |= {"measured_bubble_rate": 0.25, "peak_memory_bytes": 2**30, "evaluation_loss": 1.5}
    one, other = run(tmp_path / "one", *rows), run(tmp_path / "other", *rows[:2])
    picture = tmp_path / "curves.svg"
    assert compare.main([one, "--picture", str(picture)]) == 0
    assert "equal" not in capsys.readouterr().out
    assert compare.main([one, other, "--picture", str(picture)]) == 1
    assert f"drawn to {picture}" in capsys.readouterr().out
    drawn = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "matplotlib.axes.Axes.plot",
            lambda axes, x, y, **_: drawn.setdefault(axes.get_title("left"), (x, y)),
        )
        compare.main([one, "--picture", str(picture)])
    assert drawn["loss (dots: held-out)"] == ([0, 2], [2.0, 1.0])
    assert drawn["bubble of measured steps, %"] == ([2], [25.0])
    assert drawn["memory of the fullest rank, GiB"] == ([2], [1.0])


def test_the_axis_of_steps_has_whole_numbers(tmp_path, monkeypatch):
    """It showed step 0.25 of a run of three steps."""
    ticks = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda figure, _: ticks.extend(each for axes in figure.axes for each in axes.get_xticks()),
    )
    rows = [{"step": step, "loss": 2.0} for step in range(3)]
    compare.main([run(tmp_path / "one", *rows), "--picture", str(tmp_path / "curves.svg")])
    assert ticks
    assert all(each == int(each) for each in ticks)
