"""memory.recompute=auto: which stages recompute, what is refused, and that losses stay what they are."""

import math
from itertools import combinations

import pytest
from hydra import compose, initialize_config_dir

from helpers.configs import FOLDER, composed
from helpers.runs import losses_in
from zbpp import config as configs
from zbpp import lower
from zbpp.commands import command_line
from zbpp.config import ConfigError
from zbpp.prediction.predictor import Predictor
from zbpp.run import app

GPT = ["model=gpt_tiny", "model.hidden_size=32", "num_microbatches=4", "microbatch_size=2"]
FOUR_STAGES = [*GPT, "schedule=zb_v", "model.num_layers=4", "parallel.num_processes=2"]


def test_of_all_sets_of_stages_the_chosen_one_fits_and_recomputes_least():
    """The four stages' F's take equal times, so the fewest stages recompute."""
    predictor = Predictor()
    plain = predictor.predict(composed(*FOUR_STAGES))
    whole = predictor.predict(composed(*FOUR_STAGES, "memory.recompute=block"))
    timetable = plain.timetable
    measured = [
        predictor.measure(composed(*FOUR_STAGES, f"memory.recompute={name}"), timetable)[0]
        for name in ("none", "block")
    ]
    peaks = {}
    for chosen in (frozenset(each) for size in range(5) for each in combinations(range(4), size)):
        ranks = measured[0].mixed(measured[1], chosen).predicted(lower(timetable))
        peaks[chosen] = max(rank.peak for rank in ranks)
    assert peaks[frozenset()] == max(rank.peak for rank in plain.ranks)
    assert peaks[frozenset(range(4))] == max(rank.peak for rank in whole.ranks)
    chosen_ones = set()
    for limit in sorted(set(peaks.values())):
        gib = math.nextafter(limit / 2**30, math.inf)
        found = predictor.predict(composed(*FOUR_STAGES, "memory.recompute=auto", f"memory.limit={gib!r}"))
        assert max(rank.peak for rank in found.ranks) <= limit * (1 + 1e-9)
        assert len(found.recomputed) == min(len(each) for each in peaks if peaks[each] <= limit)
        chosen_ones.add(found.recomputed)
    assert len(chosen_ones) > 1  # or else the limits tell nothing apart


def test_a_limit_that_nothing_fits_is_refused_with_the_least_that_does():
    predictor = Predictor()
    auto = [*FOUR_STAGES, "memory.recompute=auto"]
    with pytest.raises(ConfigError, match=r"nothing|no choice of stages to recompute fits") as caught:
        predictor.predict(composed(*auto, "memory.limit=0.0001"))
    least = str(caught.value).split("write memory.limit=")[1].split()[0]
    found = predictor.predict(composed(*auto, f"memory.limit={least}"))
    assert max(rank.peak for rank in found.ranks) <= float(least) * 2**30


def test_auto_needs_a_limit():
    with pytest.raises(ConfigError, match="stays within memory.limit, and there is none"):
        composed("memory.recompute=auto")


def losses(folder, *more):
    """(the losses of a run on one rank with two stages, its summary)."""
    given = [*GPT, "schedule=zb_v", "model.num_layers=2", "steps=3", "evaluate_every=0", "save_weights=false"]
    configs.register()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        found = compose(
            "train", overrides=command_line.arguments([*given, *more, f"run_dir={folder}"], "train")
        )
    figures = app.train(configs.Composed.of(found))
    return losses_in(folder), figures


def test_losses_are_those_without_recompute(tmp_path):
    one = [*GPT, "schedule=zb_v", "model.num_layers=2", "parallel.num_processes=1"]
    predictor = Predictor()
    none, block = (
        max(rank.peak for rank in predictor.predict(composed(*one, f"memory.recompute={name}")).ranks)
        for name in ("none", "block")
    )
    limit = f"memory.limit={(none + block) / 2 / 2**30}"
    plain, _ = losses(tmp_path / "plain")
    chosen, figures = losses(tmp_path / "auto", "memory.recompute=auto", limit)
    assert len(plain) == 3
    assert chosen == plain
    assert figures["recomputed_stages"]
