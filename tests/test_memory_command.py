"""`zbpp memory`: what it predicts of a config, what fits, and what it refuses."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.configs import FREE_COPIES, composed
from zbpp.config import ConfigError
from zbpp.models.mlp import Mlp
from zbpp.prediction.predictor import FAKE, predict
from zbpp.prediction.switches import Switches, memory_text

MLP = ["model=mlp", "data=regression", "num_microbatches=8", "microbatch_size=64", "parallel.num_processes=2"]


def test_bytes_per_parameter_are_those_of_the_page_on_training():
    """With Adam in mixed precision 2 + 4 + 4 + 8 bytes, in float32 4 + 4 + 8; its counters are a few more."""
    model = Mlp(in_features=32, hidden_size=64, out_features=8, num_layers=8)
    parameters = sum(each.numel() for each in model.build_stage(0, 2).parameters())
    for precision, expected in (
        ("float32", (4, 4, 8)),
        ("mixed_bfloat16", (2, 4, 12)),
        ("bfloat16", (2, 2, 4)),
    ):
        stage = predict(composed(*MLP, f"precision={precision}")).stages[0]
        found = stage.weights, stage.gradients, stage.optimizer
        assert found == pytest.approx(
            [each * parameters for each in expected], rel=0.01
        )  # and Adam's counters


def test_shards_hold_a_part_of_weights_and_states_and_gather_the_rest():
    whole, part = (
        predict(composed(*MLP, *more)).stages[0]
        for more in ([], ["parallel.num_processes=4", "parallel.shard=2"])
    )
    assert (part.weights, part.optimizer) == pytest.approx((whole.weights / 2, whole.optimizer / 2), rel=0.01)
    assert part.gathered == whole.weights
    assert part.gradients == whole.gradients
    assert part.reduced == pytest.approx(whole.gradients / 2)


def test_it_says_which_switches_make_it_fit_or_which_one_has_the_lowest_peak():
    config = composed(*MLP, "microbatch_size=512")
    switches = Switches(config)
    own = switches.row()
    others = switches.others(own)
    least = min(others, key=lambda each: each.peak)
    limited = [
        replace(config, memory=replace(config.memory, limit=each / 2**30)) for each in (1e4, own.peak - 1)
    ]
    with pytest.raises(ConfigError, match="no switch makes it fit by itself.*" + re.escape(least.title)):
        list(memory_text(limited[0]))
    *_, last = memory_text(limited[1])
    fitting = [each for each in others if each.fits([own.peak - 1] * 2)]
    assert least in fitting
    listed = re.findall(r"^  (.*?)   \(", last, flags=re.M)
    assert listed == [each.title for each in sorted(fitting, key=lambda each: (each.step, each.peak))][:5]


def test_times_are_in_proportion_to_the_products_of_a_stage():
    """A linear layer costs 2 * rows * in * out in F; its B and its W cost as much. Attention has no W."""
    prediction = predict(composed(*MLP, "model.hidden_size=64"))
    for stage, found in enumerate(prediction.measured.products):
        module = Mlp(**{k: v for k, v in composed(*MLP, "model.hidden_size=64").model.items() if k[0] != "_"})
        weights = sum(each.numel() for each in module.build_stage(stage, 2).parameters() if each.dim() == 2)
        assert found == (*(2 * 64 * weights,) * 3, 0)
    frozen = predict(composed(*MLP, "model.hidden_size=64", "finetune.freeze=[layer_0.*,layer_1.*]"))
    f, b, w, _ = frozen.measured.products[0]
    assert f == b > w
    assert w == 2 * 64 * 2 * 64 * 64  # layers 2 and 3
    gpt = predict(composed("model=gpt_tiny", "parallel.num_processes=2", "num_microbatches=4"))
    f, b, w, attention = gpt.measured.products[0]
    assert b + w == 2 * f
    assert 0 < attention < f
    assert w < f < b


def test_another_cut_lowers_the_highest_peak():
    """1F1B's first ranks hold the most microbatches: fewer layers there, and more at the end."""
    config = composed(
        *MLP, "schedule=1f1b", "parallel.num_processes=4", "model.num_layers=16", "microbatch_size=512"
    )
    switches = Switches(config)
    own = switches.row()
    cut, *_ = switches.others(own)
    (counts,) = cut.changes.values()
    assert cut.title == f"model.layers_per_stage={counts}".replace(" ", "")
    assert sum(counts) == 16
    assert counts == sorted(counts)
    assert cut.peak < own.peak
    assert cut.step > own.step  # the last stage is heavier than a quarter


def test_with_frozen_weights_it_proposes_more_stages_and_slices_and_prints_the_share_of_w():
    """It proposed schedules that delay W, of which there is next to nothing."""
    frozen = composed(*MLP, "model.num_layers=8", "finetune.train=[layer_7*]")
    rows = [each.get("schedule.name") for each in Switches(frozen).choices()]
    assert rows.count("interleaved_1f1b") == 1
    assert {"schedule.name": "zb_v", "schedule.slices": 4} in [*Switches(frozen).choices()]
    assert "interleaved_1f1b" not in [
        each.get("schedule.name") for each in Switches(composed(*MLP)).choices()
    ]
    assert any(part.startswith("W is ") for part in memory_text(frozen))


class Choosy(Mlp):
    """A model that looks at its numbers, which fake tensors don't have."""

    def build_stage(self, index, num_stages):
        return nn.Sequential(Look(), super().build_stage(index, num_stages))


class Look(nn.Module):
    def forward(self, x):
        return x if float(x.detach().sum()) > -1e9 else torch.zeros_like(x)


def test_a_model_that_fake_tensors_can_not_run_runs_really():
    config = composed(*MLP)
    plain = predict(config)
    target = f"{Choosy.__module__}.{Choosy.__qualname__}"
    real = predict(replace(config, model={**config.model, "_target_": target}))
    assert plain.how == FAKE
    assert real.how.startswith("by one microbatch on the CPU, since it can't run on fake tensors: ")
    assert [each.peak for each in real.ranks] == pytest.approx([each.peak for each in plain.ranks], rel=0.01)


class Recurrent(Mlp):
    """A model with an LSTM, whose operator keeps memory that fake tensors don't show."""

    def build_stage(self, index, num_stages):
        return nn.Sequential(Sequence(), super().build_stage(index, num_stages))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 4)

    def forward(self, x):
        return x + self.lstm(x.mean(dim=-1, keepdim=True))[0].mean()


def test_a_model_with_an_lstm_runs_really():
    config = composed(*MLP)
    target = f"{Recurrent.__module__}.{Recurrent.__qualname__}"
    found = predict(replace(config, model={**config.model, "_target_": target}))
    assert found.how.endswith("can't run on fake tensors: LSTM keeps memory that they don't show")


def test_a_model_that_must_run_really_is_refused_where_it_would_not_fit():
    """The system killed the command, or another one."""
    config = composed(*MLP)
    target = f"{Recurrent.__module__}.{Recurrent.__qualname__}"
    large = {**config.model, "_target_": target, "hidden_size": 300_000}
    with pytest.raises(ConfigError, match=r"LSTM keeps .*, and on this CPU a stage takes \d+ GiB"):
        predict(replace(config, model=large))


def test_every_switch_that_is_off_is_listed_with_its_saving():
    switches = Switches(composed(*MLP, "memory.limit=1", FREE_COPIES))
    own = switches.row()
    rows = {row.title: row for row in (own, *switches.others(own))}
    for title in (
        "memory.recompute=block",
        "memory.recompute=auto",
        "memory.offload=auto",
        "memory.offload_weights=true",
        "memory.gradient_release=step optimizer.clip_norm=null",
        "optimizer.validation=after",
    ):
        assert rows[title].prediction is not None, rows[title].why
    own = rows["as configured"]
    assert rows["memory.offload_weights=true"].peak < own.peak < rows["optimizer.validation=after"].peak
    assert rows["optimizer.validation=after"].step <= own.step
    assert rows["memory.recompute=block"].step > own.step
    assert rows["memory.recompute=auto"].step == own.step  # 1 GiB is enough without


def test_batches_of_tokens_count_as_if_all_microbatches_were_the_longest():
    """Windows of text are alike: with one of 64 tokens per microbatch the prediction is that of rows."""
    given = ["model=gpt_tiny", "data=stdlib", "num_microbatches=4", "microbatch_size=1"]
    tokens = ["data.batching=tokens", "data.packing=false", "model.sequence_length=64"]
    rows = predict(composed(*given, "model.sequence_length=64"))
    same, larger = (predict(composed(*given, *tokens, f"data.tokens_per_batch={n}")) for n in (256, 512))
    assert [each.peak for each in same.ranks] == [each.peak for each in rows.ranks]
    assert all(two.peak > one.peak for one, two in zip(same.ranks, larger.ranks, strict=True))
    assert "a bound: every microbatch as long as the longest of the first 200 batches" in same.how
