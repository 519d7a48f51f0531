"""model.layers_per_stage=auto: the cut that `zbpp train` and `zbpp memory` choose, keep and refuse."""

import os
import re
import time

import pytest

from helpers.configs import all_forms, composed
from zbpp import simulate
from zbpp.config import ConfigError, read_run_config, with_values
from zbpp.launch import on_ranks
from zbpp.models.mlp import Mlp
from zbpp.prediction.chosen_cut import chosen_cut
from zbpp.prediction.predictor import Predictor
from zbpp.prediction.switches import Switches
from zbpp.run import app, speeds
from zbpp.run.cut import check_cut
from zbpp.run.model import build_model, layers_per_stage
from zbpp.run.plan import planned
from zbpp.run.speeds import speeds_by_time

MLP = [
    "model=mlp",
    "model.hidden_size=256",
    "data=regression",
    "parallel.num_processes=2",
    "num_microbatches=4",
]
AUTO = ["model.layers_per_stage=auto", "parallel.speeds=[1,3]"]
PREDICTOR = Predictor()


def chosen(*arguments):
    return chosen_cut(composed(*arguments), 2, PREDICTOR)


def step_ms(config):
    """The simulated step of a config, whose stages are measured one by one."""
    found = PREDICTOR.predict(config)
    return simulate(found.timetable, found.costs).makespan


def test_no_cut_of_the_configured_schedule_is_faster():
    """Against all cuts, each of which is built, measured and simulated."""
    given = [*MLP, *AUTO, "schedule=1f1b", "model.num_layers=6"]
    choice = chosen(*given)
    steps = {
        count: step_ms(with_values(composed(*given), {"model.layers_per_stage": [count, 6 - count]}))
        for count in range(1, 6)
    }
    (first, last) = choice.changes["model.layers_per_stage"]
    assert choice.changes == {"model.layers_per_stage": [first, 6 - first]}
    assert steps[first] == min(steps.values())
    assert steps[first] == pytest.approx(choice.found.makespan)
    assert 2 * first <= last  # the slow rank's share


def test_schedule_auto_leaves_the_schedule_to_be_chosen_and_a_head_may_be_alone():
    given = ["model=llama_tiny", "model.num_layers=6", *MLP[3:], *AUTO]
    config = composed(*given, "schedule=auto")
    choice = chosen_cut(config, 2, PREDICTOR)
    assert len(choice.layers) == 7
    assert choice.changes["schedule.name"] == choice.found.schedule != "zb_h1"
    assert sum(choice.changes["model.layers_per_stage"]) == 6
    assert choice.found.makespan < chosen(*given).found.makespan
    run = with_values(config, choice.changes)
    assert run.schedule.replan == "zb_auto"  # which plans again, for measured times
    timetable = planned(run, 2)
    assert timetable == choice.found.timetable
    assert layers_per_stage(build_model(run.model), timetable.num_stages)


def test_the_whole_run_is_within_the_limits_and_limits_that_are_said_to_do_do():
    given = [*MLP, *AUTO]
    free = with_values(composed(*given), chosen(*given).changes)
    _, fast = (each.peak / 2**30 for each in PREDICTOR.predict(free).ranks)
    narrow = [*given, f"memory.limit=[1,{0.8 * fast}]"]
    run = with_values(composed(*narrow), chosen(*narrow).changes)
    assert run.model["layers_per_stage"] != free.model["layers_per_stage"]
    assert PREDICTOR.predict(run).ranks[1].peak <= 0.8 * fast * 2**30
    with pytest.raises(ConfigError, match="no cut is within it; the one that exceeds it least") as caught:
        chosen(*given, "memory.limit=[0.0001,0.0001]")
    assert chosen(*given, str(caught.value).split("needs ")[1])


def test_adapters_leave_w_nearly_nothing_and_a_frozen_base_its_weights():
    pytest.importorskip("peft")
    lora = ["finetune.lora.r=2", "finetune.lora.target_modules=['0']"]
    plain, adapted = (chosen(*MLP, *AUTO, *more).found.costs for more in ([], lora))
    assert sum(adapted.w) < 0.05 * sum(adapted.b)
    assert sum(plain.w) == pytest.approx(sum(plain.b))
    weights = sum(each.weights for each in PREDICTOR.predict(composed(*MLP, *lora)).stages)
    assert weights <= sum(adapted.static) < 1.2 * weights


def test_zbpp_memory_says_the_cut_and_gives_other_schedules_cuts_of_their_own():
    given = [*MLP, "parallel.num_processes=3", AUTO[0], "parallel.speeds=[1,1,3]"]
    switches = Switches(composed(*given))
    assert re.fullmatch(
        r"cut for ranks of speed 1, 1, 3: model.layers_per_stage=\[\d,\d,\d\] \(one stage per rank\)\n"
        r"step / ideal: [\d.]+; even cut: [\d.]+; no timetable of this cut and placement below [\d.]+.*\n"
        r"another order of the ranks is better: 2, 0, 1, of speeds 3, 1, 1: [\d.]+",
        switches.chosen.text(),
    )
    own = switches.row()
    (other,) = (each for each in switches.choices() if each.get("schedule.name") == "zb_v")
    row = switches.row(other)
    assert row.title == "schedule=zb_v schedule.replan=null model.layers_per_stage=auto"
    assert row.prediction.timetable.num_stages == 2 * own.prediction.timetable.num_stages


def test_layers_per_stage_needs_no_plus():
    assert composed("model=gpt_tiny", "model.layers_per_stage=[5,3]").model["layers_per_stage"] == [5, 3]


class Whole:
    """A model that says nothing of its layers."""

    def __init__(self, layers_per_stage=None):
        pass

    def build_stage(self, index, num_stages):
        raise NotImplementedError

    def loss(self, output, target):
        return output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["parallel.speeds=[1,2,3]"], r"parallel.speeds=\[1, 2, 3\] has 3 numbers for 2 ranks"),
        (["memory.limit=[1,2,3]"], r"memory.limit=\[1, 2, 3\] has 3 numbers for 2 ranks"),
        (
            [f"model._target_={__name__}.Whole", "data=regression"],
            "Whole has no cut to choose: give the class",
        ),
    ],
)
def test_what_no_cut_can_be_chosen_for_is_refused_in_a_line(arguments, said):
    with pytest.raises(ConfigError, match=said) as caught:
        check_cut(composed("parallel.num_processes=2", "model.layers_per_stage=auto", *arguments), 2)
    assert "\n" not in str(caught.value)


def trained(folder, *more):
    """The figures of a run on one rank, which has two stages."""
    given = [
        "model=mlp",
        "data=regression",
        "schedule=zb_v",
        "num_microbatches=2",
        "steps=2",
        "evaluate_every=0",
    ]
    return app.train(all_forms(*given, "model.layers_per_stage=auto", f"run_dir={folder}", *more))


def test_a_run_writes_the_chosen_cut_into_its_config_and_keeps_it_when_it_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    first = trained(folder, "stop_after=1")["layers_per_stage"]
    assert sum(first) == 8
    saved = read_run_config(folder / "config.yaml")
    assert saved["model"]["layers_per_stage"] == first
    monkeypatch.setattr("zbpp.prediction.chosen_cut.chosen_cut", None)
    assert trained(folder)["layers_per_stage"] == first


def test_another_schedule_replaces_a_cut_that_does_not_fit_it_and_the_run_says_so(tmp_path, capsys):
    folder = tmp_path / "run"
    first = trained(folder, "stop_after=1")["layers_per_stage"]
    capsys.readouterr()
    figures = trained(folder, "schedule=1f1b")
    assert (figures["schedule"], figures["layers_per_stage"]) == ("1f1b", [8])
    assert f"a new cut: the earlier start's, {first}, doesn't fit this one" in capsys.readouterr().out


@pytest.mark.nightly
def test_all_ranks_get_the_cut_that_rank_0_has_chosen(tmp_path):
    given = all_forms(*MLP, *AUTO, "schedule=auto", "steps=8", f"run_dir={tmp_path}")
    figures = on_ranks(2, app.train, given)
    assert (
        figures["layers_per_stage"] == chosen(*MLP, *AUTO, "schedule=auto").changes["model.layers_per_stage"]
    )


@pytest.mark.parametrize(
    ("seconds", "speeds"),
    [
        ([1.0, 1.08, 0.99], [1, 1, 1]),
        ([2.0, 1.0, 1.05], [1, 1.95, 1.95]),
        ([1.0, 1.2], [1.2, 1]),
    ],
)
def test_speeds_within_ten_percent_count_as_equal(seconds, speeds):
    assert speeds_by_time(seconds) == pytest.approx(speeds, abs=0.01)


class OtherProcess:
    """A meeting with one other process, which has told its time and its memory."""

    def of_rank_0(self, name, text):
        return text

    def gather(self, name, text):
        return [text, "0.1 23.9" if name == "block" else text]


def test_on_accelerators_the_memory_of_each_device_is_its_limit(monkeypatch):
    monkeypatch.setattr(speeds, "block_seconds", lambda *_: 0.2)
    monkeypatch.setattr(speeds, "free_bytes", lambda device: 11.509 * 2**30)
    monkeypatch.setattr(speeds, "make_current", lambda device: None)
    monkeypatch.setattr(speeds, "is_accelerator", lambda device: True)
    found = speeds.measured_ranks(OtherProcess(), composed(*MLP, *AUTO), 2, None)
    assert found == {"parallel.speeds": [1, 2], "memory.limit": [11.5, 23.9]}
    given = composed(*MLP, *AUTO, "memory.limit=8")
    assert speeds.measured_ranks(OtherProcess(), given, 2, None).keys() == {"parallel.speeds"}
    monkeypatch.setattr(speeds, "is_accelerator", lambda device: False)
    assert "memory.limit" not in speeds.measured_ranks(OtherProcess(), composed(*MLP, *AUTO), 2, None)


class SlowOnRank0(Mlp):
    """An MLP whose blocks take 30 ms more on rank 0."""

    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        if os.environ.get("RANK") == "0":
            stage.register_forward_hook(lambda *_: time.sleep(0.03))
        return stage


def measured_run(folder, *more):
    given = [*MLP, f"model._target_={__name__}.SlowOnRank0", AUTO[0], "schedule=1f1b", "steps=2"]
    return on_ranks(2, app.train, all_forms(*given, "evaluate_every=0", f"run_dir={folder}", *more))


def test_without_speeds_each_rank_times_a_block_and_the_slow_one_gets_less(tmp_path, capfd):
    folder = tmp_path / "run"
    first, second = measured_run(folder, "stop_after=1")["layers_per_stage"]
    assert first < second
    saved = read_run_config(folder / "config.yaml")
    slow, fast = saved["parallel"]["speeds"]
    assert slow == 1 < 2 < fast
    assert "measured on a block of the model: parallel.speeds=[1," in capfd.readouterr().out
    assert measured_run(folder)["layers_per_stage"] == [first, second]
    assert "measured on a block" not in capfd.readouterr().out
    assert read_run_config(folder / "config.yaml")["parallel"]["speeds"] == [slow, fast]
