"""`labels` of a Hugging Face model mean what they mean to transformers, in every way that data enter.

The reference is the library's own `model(input_ids=..., labels=...).loss`.
"""

import logging

import pytest
import torch

pytest.importorskip("transformers")

from torch.distributed.pipelining import PipelineStage

import zbpp
from helpers.hf_folders import TOKENS, config_of, reference, saved
from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh, plan, torch_pipelining
from zbpp.config import BatchingConfig
from zbpp.data.loader import loaded_data
from zbpp.data.sequences import padded_rows
from zbpp.models.gpt import Gpt
from zbpp.models.hf import HuggingFace
from zbpp.run.data import batched_by_tokens
from zbpp.stage_api import target_names
from zbpp.training.batches import Batches
from zbpp.training.fine_tuned import FineTuned

LABELS = TOKENS.clone()
LABELS[0, :4] = -100
SHIFTED = torch.cat([LABELS[:, 1:], torch.full((2, 1), -100)], 1)
LENGTHS = (5, 12, 1, 8)
SLICED = {"num_slices": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    saved("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def expected(folder):
    with torch.no_grad():
        return reference(folder)(input_ids=TOKENS, labels=LABELS).loss.item()


@pytest.fixture(scope="module")
def pipeline(folder):
    """Two stages of one process, of which adapters and frozen parameters change no name of a target."""
    model = FineTuned(HuggingFace(path=folder), freeze=["*norm*"])
    with Pipeline(model, "zb_v", num_microbatches=2) as made:
        yield made


def mean(losses):
    return sum(map(float, losses)) / len(losses)


def is_the_librarys(expected):
    return pytest.approx(expected, rel=1e-5)


def test_ones_own_loop(pipeline, expected):
    batches = [{"labels": LABELS}, {"shift_labels": SHIFTED}, {"target": SHIFTED}]
    batches += [{name: zbpp.per_microbatch(each[name].split(1)) for name in each} for each in batches]
    for batch in batches:
        assert mean(pipeline.step(TOKENS, **batch)) == is_the_librarys(expected)
        assert mean(pipeline.evaluate(TOKENS, **batch)) == is_the_librarys(expected)
    with pytest.raises(ValueError, match="given twice, as labels= and as target=: give one"):
        pipeline.evaluate(TOKENS, target=SHIFTED, labels=LABELS)


def test_a_target_of_a_slice_is_the_first_label_of_the_next_one(folder, expected):
    options = {"slice_bounds": [0, 5, 6, 12]}
    with Pipeline(HuggingFace(path=folder), plan("zb_v", 1, 2, **SLICED), **options) as pipeline:
        assert mean(pipeline.step(TOKENS, labels=LABELS)) == is_the_librarys(expected)


class Rows(torch.utils.data.Dataset):
    """Lists, as a tokenizer gives them; every row is the same one, or one of LENGTHS."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        x, labels = self.rows[row]
        return {"input_ids": x.tolist(), "labels": labels.tolist()}


SOURCES = {
    "rows of a Dataset": lambda: Rows([(TOKENS[1], LABELS[1])] * 2),
    "dicts": lambda: [{"input_ids": TOKENS, "labels": LABELS}],
    "dicts with a mask": lambda: [
        {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "labels": LABELS}
    ],
    "dicts, shifted": lambda: [{"input_ids": TOKENS, "shift_labels": SHIFTED}],
    "tuples": lambda: [(TOKENS, SHIFTED)],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_batches_of_a_trainer(folder, pipeline, expected, kind, caplog):
    if kind.startswith("rows"):
        with torch.no_grad():
            expected = reference(folder)(input_ids=TOKENS[1:], labels=LABELS[1:]).loss.item()
    data = loaded_data(SOURCES[kind](), batch_size=2, seed=0, collate=padded_rows)
    args, target = Batches(pipeline, data).of_step(0)
    assert mean(pipeline.evaluate(*args, target=target)) == is_the_librarys(expected)
    assert not caplog.records


@pytest.mark.parametrize("is_packed", [True, False])
def test_sequences_of_batches_of_tokens_are_shifted_one_by_one(folder, pipeline, is_packed):
    """No sequence has the next one's first token as a target, nor its own last token an ignored one."""
    rows = [(TOKENS[0, :length], TOKENS[0, :length]) for length in LENGTHS]
    whole, total = reference(folder), 0.0
    for x, labels in rows:
        if len(x) > 1:
            with torch.no_grad():
                loss = whole(input_ids=x[None], labels=labels[None]).loss.item()
            total += loss * (len(x) - 1)
    options = {"batching": "tokens", "packing": None if is_packed else False}
    data = batched_by_tokens(
        loaded_data(Rows(rows), batch_size=1, seed=0, collate=padded_rows),
        BatchingConfig(**options, tokens_per_batch=sum(LENGTHS)),
        keeps_apart=True,
        names=target_names(pipeline.stages.values()),
    )
    args, target = Batches(pipeline, data._replace(is_shared=False)).of_step(0)
    found = mean(pipeline.evaluate_as_one(*args, target=target))
    assert found == is_the_librarys(total / (sum(LENGTHS) - len(LENGTHS)))


def on_two_ranks(rank, folder):
    """A pipeline of two ranks, torch's Schedule over it, and two processes that share sequences."""
    found = {}
    with Pipeline(HuggingFace(path=folder), "zb_h1", num_microbatches=2) as pipeline:
        found["pipeline"] = pipeline.step(TOKENS, labels=LABELS)
    model = HuggingFace(path=folder)
    stage = PipelineStage(model.build_stage(rank, 2), rank, 2, torch.device("cpu"))
    schedule = torch_pipelining.ScheduleGPipe(stage, 2, loss_fn=model.loss)
    for name, target in {"labels": LABELS, "shift_labels": SHIFTED, "target": SHIFTED}.items():
        losses = []
        schedule.step(*([TOKENS] if rank == 0 else []), losses=losses, **{name: target})
        found[f"torch's Schedule, {name}"] = losses
    assert not torch_pipelining.engine.fallbacks
    timetable = plan("zb_v", 1, 2, **SLICED)
    options = {"mesh": make_mesh(context=2), "slice_bounds": [0, 6, 8, 12]}
    with Pipeline(HuggingFace(path=folder), timetable, **options) as pipeline:
        found["context"] = pipeline.step(TOKENS, labels=LABELS)
    return {name: [*map(float, losses)] for name, losses in found.items()}


def test_two_ranks_torchs_schedules_and_a_context(folder, expected):
    """Of torch's Schedule each microbatch weighs the same, so its reference is the mean over rows."""
    with torch.no_grad():
        whole = reference(folder)
        rows = [whole(input_ids=TOKENS[i : i + 1], labels=LABELS[i : i + 1]).loss.item() for i in range(2)]
    nothing, found = run_ranks(on_two_ranks, 2, folder)
    assert nothing["pipeline"] == []
    for name, losses in found.items():
        assert mean(losses) == is_the_librarys(mean(rows) if "Schedule" in name else expected), name


def of_family(kind, **sizes):
    config = config_of(kind, **sizes)
    return HuggingFace(config={**config.to_dict(), "model_type": kind})


BART = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 1, "decoder_attention_heads": 4,
        "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48}  # fmt: skip


def test_labels_of_a_family_that_does_not_shift_them_are_each_positions_own():
    """BartForCausalLM is a decoder: whoever trains it shifts its inputs."""
    (stage,) = [of_family("bart", **BART).build_stage(0, 1)]
    with Pipeline({0: stage.eval()}, plan("gpipe", 1, 1), of_family("bart", **BART).loss) as pipeline:
        found = mean(pipeline.step(TOKENS, labels=LABELS))
    whole = stage.library_model.eval()
    with torch.no_grad():
        assert found == is_the_librarys(whole(input_ids=TOKENS, labels=LABELS).loss.item())


def test_labels_are_refused_where_the_library_computes_another_loss_from_them(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "loss_function", lambda self, logits, **options: logits.sum())
    model = HuggingFace(config={**config_of("llama", num_hidden_layers=2).to_dict(), "model_type": "llama"})
    with Pipeline(model, "zb_h1", num_microbatches=2) as pipeline:
        with pytest.raises(ValueError, match="LlamaForCausalLM computes a loss of its own.*write target="):
            pipeline.step(TOKENS, labels=LABELS)
        pipeline.step(TOKENS, target=SHIFTED)


@pytest.mark.parametrize(
    ("batch", "is_told"),
    [
        ((TOKENS, TOKENS), True),
        ({"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "target": LABELS}, True),
        ({"input_ids": TOKENS, "target": SHIFTED}, False),
        ({"input_ids": TOKENS, "labels": LABELS}, False),
    ],
)
def test_a_run_whose_targets_are_its_inputs_says_so_once(pipeline, batch, is_told, caplog):
    with caplog.at_level(logging.WARNING):
        batches = Batches(pipeline, loaded_data([batch], batch_size=2, seed=0))
        for step in range(3):
            batches.of_step(step)
    assert [each.message.partition(":")[0] for each in caplog.records] == is_told * [
        "each target of the first batch is its own input token, so the model learns to copy"
    ]


def test_of_another_model_labels_are_the_target_as_it_is():
    model = Gpt(vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, sequence_length=16)
    with Pipeline(model, "zb_h1", num_microbatches=2) as pipeline:
        data = loaded_data([{"x": TOKENS, "labels": LABELS}], batch_size=2, seed=0)
        _, target = Batches(pipeline, data).of_step(0)
        assert torch.equal(target, LABELS)
