"""What a Trainer in a pipeline prints once."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from helpers.hf_trainer import ARGUMENTS, Case, model_of, padded, rows
from zbpp import Costs, plan, simulate

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from zbpp.transformers import in_pipeline  # noqa: E402  # after the check for its libraries
from zbpp.transformers.report import Held, held, report, report_measured  # noqa: E402


def test_the_report_names_the_cut_and_the_bubble_and_what_more_microbatches_bring():
    planned = partial(plan, "zb_h1", 2)
    rates = [f"{100 * simulate(planned(num)).bubble_rate:.0f} %" for num in (1, 4, 8)]
    text = report("zb_h1", planned(1), [3, 1], [Held(3 * 2**20, 0, 0), Held(2**31, 0, 0)], planned)
    assert text.splitlines() == [
        "zbpp: zb_h1: 2 ranks, stages of 3, 1 layers, 1 microbatches a step",
        "zbpp: weights: 3 MiB, 2 GiB on ranks 0 to 1",
        f"zbpp: predicted bubble: {rates[0]} if F, B and W take equally long",
        "zbpp: gradient_accumulation_steps=1 are all microbatches that there are; the bubble would be with 4 "
        f"{rates[1]}, with 8 {rates[2]}: write more of them, with a smaller per_device_train_batch_size",
    ]


def test_the_second_report_names_the_measured_bubble_and_the_memory_of_each_rank():
    timetable = plan("1f1b", 2, 4)
    measured = simulate(timetable, Costs(comm=2.0))
    rates = [f"{100 * each.bubble_rate:.0f} %" for each in (measured, simulate(timetable))]
    assert rates[0] != rates[1]
    measured = replace(measured, peak_memory=(2.5 * 2**30, 2**30))
    text = report_measured(measured, [Held(0, 2**20, 2**21), Held(0, 1536, 3 * 2**10)])
    assert text.splitlines() == [
        f"zbpp: measured bubble: {rates[0]} in the second step, predicted {rates[1]}",
        "zbpp: gradients: 1 MiB, 1.5 KiB; optimizer states: 2 MiB, 3 KiB",
        "zbpp: peak memory of the processes: 2.5 GiB, 1 GiB",
    ]


def held_by(parameters):
    return sum(each.nbytes for each in parameters)


def test_both_reports_are_printed_once_with_the_bytes_of_the_whole_model(capsys):
    """One process has all stages. The embedding is frozen: no gradient, no state of Adam."""
    model = model_of(Case(sizes={"num_hidden_layers": 6}))
    model.model.embed_tokens.requires_grad_(False)
    weights = held_by([*model.parameters(), *model.buffers()])
    trained = [each for each in model.parameters() if each.requires_grad]
    more = {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 4}
    args = transformers.TrainingArguments("unused", **{**ARGUMENTS, **more})
    trainer = in_pipeline(transformers.Trainer, "zb_v")(
        model=model, args=args, train_dataset=rows(25, 1), data_collator=padded
    )
    trainer.train()
    trainer.train()
    trainer.pipeline.close()
    states = 2 * held_by(trained) + 4 * len(trained)  # and a step, in float32
    (first, of_weights, _), (bubble, others, _) = split_at(said(capsys), 3)
    assert first == "zbpp: zb_v: 1 ranks, stages of 3, 3 layers, 4 microbatches a step"
    assert of_weights == f"zbpp: weights: {in_kib(weights)} on ranks 0 to 0"
    assert re.fullmatch(r"zbpp: measured bubble: \d+ % in the second step, predicted 0 %", bubble)
    assert others == f"zbpp: gradients: {in_kib(held_by(trained))}; optimizer states: {in_kib(states)}"
    assert [each["step"] for each in trainer.state.log_history if "bubble" in each] == [4, 8]


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("zbpp: ")]


def split_at(lines, place):
    return lines[:place], lines[place:]


def in_kib(size):
    """In three digits."""
    return f"{size / 1024:.3g} KiB"


@pytest.mark.parametrize("double, statistics", [(False, 64 * 4 + 64), (True, 64 + 4 + 64 + 256 * 4 + 4)])
def test_a_base_of_four_bits_counts_as_what_it_holds(double, statistics):
    """64 numbers share a scale, in float32 or in a byte; 256 of these bytes share one. Codes lie beside."""
    modules = pytest.importorskip("bitsandbytes.nn")
    layer = modules.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=double)
    layer = layer.to("cpu")
    pipeline = SimpleNamespace(parameters=layer.parameters, stages={0: layer})
    assert layer.weight.quant_state is not None
    assert held(pipeline).weights == 64 * 64 // 2 + statistics
