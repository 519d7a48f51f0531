"""Hugging Face's models over slices of a sequence, against plain autograd over the whole one in float64."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

import transformers

import zbpp
from helpers.hf_float64 import library_in_float64
from helpers.slices import assert_equals_whole
from helpers.split import assert_close, double
from zbpp import Pipeline, plan
from zbpp.autograd.models import past as past_room
from zbpp.autograd.models.past import Past
from zbpp.models.hf import HuggingFace, trial
from zbpp.models.hf import slices as hf_slices
from zbpp.models.hf.shrink import build_on_meta
from zbpp.models.layers import token_loss
from zbpp.run.stages import recompute_stages
from zbpp.stage_api import mean_over_tokens, takes_slices

TIME, WORDS = 12, 40
BOUNDS = [0, 5, 6, 10, 12]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
CONFIGS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": {"sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4,
             "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {},
    "olmo2": {},
    "phi3": {"sliding_window": 4},
    "granite": {},
    "falcon": {},
    "smollm3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4, "sliding_window": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}  # fmt: skip


def stages_of(kind, num_stages=2, head="whole"):
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    config = {"model_type": kind, **special, **SIZES, **CONFIGS[kind]}
    model = HuggingFace(config=config, vocab_size=WORDS, sequence_length=16, head=head)
    return [model.build_stage(index, num_stages).double() for index in range(num_stages)]


def tokens():
    return torch.randint(1, WORDS, (2, TIME), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def in_float64():
    with library_in_float64():
        yield


AT_NIGHT = {"gpt_neox", "olmo2", "granite", "falcon"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind in AT_NIGHT else kind for kind in CONFIGS]
)
def test_slices_are_the_whole_sequence(kind, in_float64):
    """Two stages in training mode; a trial on a small copy accepts them, and the linears wait for W."""
    stages = stages_of(kind)
    assert all(takes_slices(stage, index) for index, stage in enumerate(stages))
    facts = assert_equals_whole(stages, tokens(), BOUNDS)
    weights = [each for each in facts.computed if each.endswith(("proj.weight", "lm_head.weight"))]
    assert not weights


@pytest.mark.parametrize("what", ["block", "stage"])
def test_recompute_with_slices(what, in_float64):
    stages = stages_of("gemma3_text")
    recompute_stages(dict(enumerate(stages)), what)
    assert_equals_whole(stages, tokens(), BOUNDS, is_recomputed=True)


PADDING = torch.ones(2, TIME, dtype=torch.long)
PADDING[0, :3] = PADDING[1, -4:] = 0
LENGTHS = [5, 4, 3]
DOCUMENT = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
LOWEST = torch.finfo(torch.float64).min
BLOCKS = torch.zeros(TIME, TIME).double().masked_fill(~(DOCUMENT[:, None] == DOCUMENT).tril(), LOWEST)
BATCHES = {
    "padding": {"attention_mask": PADDING},
    "padding and positions": {"attention_mask": PADDING, "position_ids": (PADDING.cumsum(1) - 1).clamp(0)},
    "documents by a mask of blocks": {
        "attention_mask": BLOCKS.expand(2, 1, -1, -1),
        "position_ids": POSITIONS,
    },
}


@pytest.mark.parametrize(("kind", "batch"), [*(("llama", name) for name in BATCHES), ("mistral", "padding")])
def test_masks_and_positions_of_slices(kind, batch, in_float64):
    """Cut along time as the runtime cuts them; a mask of four dimensions comes whole. Mistral: a window."""

    def call(stage, x, *received, sequence_slice):
        given = {}
        if not received:
            place = sequence_slice
            part = slice(None) if place is None else slice(place.start, place.end)
            parts = {name: each[:, part] for name, each in BATCHES[batch].items() if each.dim() == 2}
            given = BATCHES[batch] | parts
        return stage(x, *received, **given, sequence_slice=sequence_slice)

    def loss(logits, start, end):
        weights = double(2, TIME, WORDS, seed=1)[:, start:end] * PADDING[:, start:end, None]
        return (logits * weights).sum()

    assert_equals_whole(stages_of(kind), tokens(), BOUNDS, call=call, loss=loss)


def test_documents_by_positions_alone_are_refused_in_slices():
    """The library keeps them apart only without a cache: its logits would be those of one document."""
    first, _ = stages_of("llama")
    places = Past(BOUNDS)
    with pytest.raises(ValueError, match="LlamaForCausalLM can't be trained with position_ids: .* four dim"):
        first(tokens()[:, :5], position_ids=POSITIONS[:, :5], sequence_slice=places.at(0))


def test_lora_with_slices(in_float64):
    pytest.importorskip("peft")
    from zbpp.training.fine_tuned import FineTuned

    config = {"model_type": "llama", "tie_word_embeddings": False, **SIZES}
    model = HuggingFace(config=config, vocab_size=WORDS, sequence_length=16, head="whole")
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    stage = FineTuned(model, lora=lora).build_stage(0, 1).double()
    assert takes_slices(stage, 0)
    facts = assert_equals_whole(stage, tokens(), BOUNDS)
    assert len(facts.deferred) == 4 * 2 * 2


@pytest.mark.parametrize("head", ["auto", "recompute"])
def test_the_last_stages_own_loss_over_slices_is_that_of_the_sequence(head, in_float64):
    (stage,) = stages_of("qwen3", 1, head=head)
    target = tokens().roll(-1, 1)
    target[1, 3:8] = -100
    count = (target != -100).sum()

    def call(stage, x, sequence_slice):
        return stage(x, head=False, sequence_slice=sequence_slice)

    def loss(hidden, start, end):
        part = target[:, start:end]
        return stage.loss(hidden, part) * (part != -100).sum() / count

    facts = assert_equals_whole(stage, tokens(), BOUNDS, call=call, loss=loss)
    assert "lm_head.weight" in facts.deferred


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_pipeline_over_slices_has_the_losses_and_gradients_of_whole_sequences(kind, in_float64):
    """Padding goes along: the runtime cuts the mask along time."""
    target = tokens().roll(-1, 1).masked_fill(PADDING == 0, -100)
    expected, stages = stages_of(kind), dict(enumerate(stages_of(kind)))
    message = expected[0](tokens(), attention_mask=PADDING)
    loss = token_loss(expected[1](*message), target)
    loss.backward()
    timetable = plan("zb_v", 1, 2, num_slices=4)
    with Pipeline(stages, timetable, mean_over_tokens(token_loss), slice_bounds=BOUNDS) as pipeline:
        losses = pipeline.step(tokens(), attention_mask=PADDING, target=target)
        assert sum(map(float, losses)) / 2 == pytest.approx(loss.item(), rel=1e-13)
        found = {name: each.grad for name, each in pipeline.named_parameters()}
    assert_close(found, {name: each.grad for stage in expected for name, each in stage.named_parameters()})


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_torchs_counter_counts_the_operations_of_stages_as_of_the_librarys_model(kind):
    """schedule.slices=4 asks it how much of a stage's work is attention."""
    (only,), two = stages_of(kind, 1), stages_of(kind, 2)

    def count(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    expected = count(lambda: only.library_model(input_ids=tokens()))
    assert count(lambda: two[1](two[0](tokens()))) == count(lambda: only(tokens())) == expected > 0
    (own_loss,) = stages_of(kind, 1, head="auto")
    without_head = count(lambda: own_loss(tokens(), head=False))
    assert expected - without_head == 2 * tokens().numel() * SIZES["hidden_size"] * WORDS


# ---- Refusals


SMALL = {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0, "vocab_size": WORDS}
REFUSED = {
    "qwen3_next": ({"num_experts": 2}, "layers of type linear_attention"),
    "llama4_text": ({"num_local_experts": 2}, "layers of type chunked_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "layers of type conv"),
    "mamba": ({}, "its forward takes no past_key_values"),
    "jamba": ({"num_experts": 2}, "layers of type linear_attention"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_keep_more_than_keys_and_values_are_refused_by_name(kind):
    """Before any trial: a recurrence or a convolution along time would begin anew in every slice."""
    options, reason = REFUSED[kind]
    config = transformers.AutoConfig.for_model(kind, **SMALL, **options)
    with pytest.raises(ValueError, match=f"{kind} can't be run in slices of a sequence, since .*{reason}"):
        hf_slices.windows_of(build_on_meta(config))


def test_the_librarys_gradient_checkpointing_is_refused():
    """It drops the cache: a warning, and attention within each slice."""
    first, _ = stages_of("llama")
    first.library_model.model.layers[0].gradient_checkpointing = True
    with pytest.raises(ValueError, match="gradient checkpointing drops the cache.*memory.recompute=block"):
        takes_slices(first, 0)


@pytest.mark.parametrize("mutant", ["no past", "no gradient", "wrong positions", "wrong window"])
def test_the_trial_on_a_small_copy_refuses_what_slices_get_wrong(mutant, monkeypatch):
    """A family that reads its cache in another way, or not at all, is refused before the first step."""
    first, _ = stages_of("mistral")
    first._cut.refused_in_parts.clear()
    layer = hf_slices.SliceLayer
    if mutant == "no past":
        monkeypatch.setattr(layer, "update", lambda layer, key, value, *rest: (key, value))
        monkeypatch.setattr(layer, "get_mask_sizes", lambda layer, length: (length, layer.place.start))
    elif mutant == "no gradient":
        monkeypatch.setattr(past_room._Buffer, "add", lambda *args: None)
    elif mutant == "wrong positions":
        monkeypatch.setattr(layer, "get_seq_length", lambda layer: layer.place.start + 1)
    else:
        monkeypatch.setattr(hf_slices, "windows_of", lambda model: [trial.WINDOW - 1] * 4)
    with pytest.raises(ValueError, match="mistral can't be run in slices .* not that of the whole sequence"):
        takes_slices(first, 0)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_sequences_that_differ_in_length_come_in_slices(kind, in_float64):
    """Each is cut at the same shares of it."""
    batches = [tokens()[:, :length].roll(length, 0) for length in (7, 12, 4)]
    targets = [each.roll(-1, 1) for each in batches]
    counted = sum(each.numel() for each in targets)
    expected, stages = stages_of(kind), dict(enumerate(stages_of(kind)))
    total = 0.0
    for x, target in zip(batches, targets, strict=True):
        loss = token_loss(expected[1](expected[0](x)), target) * target.numel() / counted
        loss.backward()
        total += loss.item()
    timetable = plan("zb_v", 1, 3, num_slices=4)
    with Pipeline(stages, timetable, mean_over_tokens(token_loss), slice_bounds=BOUNDS) as pipeline:
        given = zbpp.per_microbatch(batches, order=[2, 1, 0])
        losses = pipeline.step(given, target=zbpp.per_microbatch(targets))
        found = {name: each.grad for name, each in pipeline.named_parameters()}
    assert sum(map(float, losses)) / 3 == pytest.approx(total, rel=1e-13)
    assert_close(found, {name: each.grad for stage in expected for name, each in stage.named_parameters()})
