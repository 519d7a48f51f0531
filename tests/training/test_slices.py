"""schedule.slices in the trainer: the losses are those of whole sequences."""

import pytest
from hydra import compose, initialize_config_dir

from helpers.configs import FOLDER, FREE_COPIES, composed
from helpers.runs import metrics_in
from zbpp import config as configs
from zbpp.commands import command_line
from zbpp.config import ConfigError
from zbpp.run import app
from zbpp.run.checks import check_together
from zbpp.run.plan import build_timetable, check_plan, slice_bounds_of
from zbpp.schedule import PlanError

TINY = [
    "schedule=zb_v", "model=llama_tiny", "model.num_layers=2", "model.hidden_size=16", "model.vocab_size=256",
    "num_microbatches=4", "microbatch_size=2", "steps=3", "evaluate_every=3", "evaluation_batches=1",
    "save_weights=false", "precision=float64", "measure_every=0",
]  # fmt: skip


def losses(folder, *more):
    """The losses of a run on one rank with two stages, and those of its evaluation at the end."""
    configs.register()
    arguments = command_line.arguments([*TINY, *more, f"run_dir={folder}"], "train")
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        app.train(configs.Composed.of(compose("train", overrides=arguments)))
    found = metrics_in(folder)
    return [each["loss"] for each in found] + [found[-1]["evaluation_loss"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    "switches",
    [
        ["schedule.slices=3"],
        ["schedule.slices=[0,20,64]", "memory.recompute=block", "optimizer.validation=after"],
    ],
)
def test_losses_are_those_of_whole_sequences(switches, whole, tmp_path):
    assert losses(tmp_path / "run", *switches) == pytest.approx(whole, rel=1e-12)


def test_a_run_in_slices_goes_on_after_it_was_left(whole, tmp_path):
    for _ in range(2):
        try:
            found = losses(tmp_path / "run", "schedule.slices=[0,30,64]", "stop_after=2", "evaluate_every=3")
        except KeyError:  # left before its evaluation
            found = []
    assert found == pytest.approx(whole, rel=1e-12)


def bounds_of(*more):
    config = composed(*TINY, "parallel.num_processes=1", *more)
    return slice_bounds_of(config, build_timetable(config.schedule, 1, config.num_microbatches))


def test_the_bounds_of_a_number_of_slices_balance_the_products_of_the_stages():
    """64 tokens of attention over 16 numbers cost less than the layers' products, and grow along the row."""
    first, second, *_, end = bounds_of("schedule.slices=4")
    lengths = [b - a for a, b in zip(bounds_of("schedule.slices=4"), [second, *_, end], strict=False)]
    assert first == 0
    assert end == 64
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    assert bounds_of("schedule.slices=[0,60,64]") == (0, 60, 64)
    divided = bounds_of("schedule.slices=4", "parallel.num_processes=2", "parallel.context=2")
    assert divided[-1] == 64  # of whole sequences, and each process has an equal part of each slice
    assert not any(each % 2 for each in divided)
    assert bounds_of() == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("0", "write how many, as 8; or the tokens"),
        ("eight", "write how many, as 8; or the tokens"),
        ("[0,8.5,64]", "write how many, as 8; or the tokens"),
        ("[4,8]", "schedule.slices=.*: write where each slice begins, from 0 on"),
        ("[0,8,8,64]", r"schedule.slices=.*: slice 1, \[8, 8\), has no tokens"),
    ],
)
def test_slices_that_are_none_are_refused_before_a_model_is_made(given, words):
    with pytest.raises((ConfigError, PlanError), match=words):
        check_plan(composed(*TINY, f"schedule.slices={given}"), 1)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        (["memory.offload=auto", FREE_COPIES], "doesn't go with memory.offload=auto: later slices read"),
        (["cuda_graphs=true"], "doesn't go with cuda_graphs=true"),
        (["schedule.replan=zb_auto"], "doesn't go with schedule.replan=zb_auto"),
    ],
)
def test_switches_that_slices_exclude_are_refused(switches, words):
    with pytest.raises(ConfigError, match=words):
        check_together(composed(*TINY, "schedule.slices=4", *switches))


def test_slices_of_other_sequences_than_the_data_has_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"schedule.slices: input 0 has shape \[2, 64\]"):
        losses(tmp_path / "run", "schedule.slices=[0,16,32]")
    with pytest.raises((ConfigError, PlanError), match="of a sequence of 64 tokens without tokens"):
        bounds_of("schedule.slices=100")
