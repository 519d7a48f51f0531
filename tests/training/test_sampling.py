"""Text from the model through its pipeline: equal to greedy decoding of the uncut model."""

import json
from functools import partial

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.data import text_data
from zbpp.data.tokenizer import begin_and_ends
from zbpp.models.gpt import Gpt
from zbpp.run.callbacks import check_prompt
from zbpp.training.callbacks import Callback
from zbpp.training.loggers import JsonLines
from zbpp.training.optim.optimizer import adamw, warmup_cosine
from zbpp.training.sampling import Bytes, Sampler, TokenizerFile, generate
from zbpp.training.trainer import Trainer

PROMPT = list(b"def f")
WINDOW = 12


def gpt():
    return Gpt(num_layers=4, hidden_size=16, num_heads=2, sequence_length=WINDOW, dropout=0.1)


def trainer_of(rank, num_ranks, schedule, folder, **options):
    """A Trainer of a GPT with dropout on the text in `folder`."""
    model, timetable = gpt(), plan(schedule, num_ranks, 4)
    stages = {index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(rank)}
    pipeline = Pipeline(stages, timetable, model.loss)
    return Trainer(
        pipeline=pipeline,
        optimizer=adamw(
            pipeline.parameters(), learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        ),
        data=text_data(
            path=folder / "text.txt", sequence_length=WINDOW, vocab_size=256, batch_size=4, seed=0
        ),
        learning_rate=partial(warmup_cosine, num_steps=20, warmup_steps=5, min_ratio=0.1),
        clip_norm=1.0,
        num_recorded=0,
        **options,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("def fox(brown):\n    return quick + brown\n" * 50)
    return tmp_path


def greedy(whole, num_tokens):
    """Plain decoding in one process."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = whole.eval()(torch.tensor([tokens[-WINDOW:]]))
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


class Leaver(Callback):
    """Rank 1 alone wants to leave, in its step 2."""

    def before_step(self, trainer, step):
        if step == 2 and trainer.pipeline.rank == 1:
            trainer.leave("rank 1 has had enough")


def on_a_rank(rank, schedule, folder, validation):
    """Two ranks train until one of them leaves, and sample: (steps, why, losses, weights, tokens, drawn)."""
    log = JsonLines(folder).sample if rank == 0 else lambda *_: None
    callbacks = [
        Leaver(),
        Sampler("def f", Bytes(), every=2, max_tokens=3, window=WINDOW, log=log),
    ]
    trainer = trainer_of(rank, 2, schedule, folder, callbacks=callbacks, post_validation=validation)
    losses = [metrics["loss"] for metrics in trainer.run(8)]
    pipeline = trainer.pipeline
    more = {"max_tokens": 20, "window": WINDOW}
    drawn = [generate(pipeline, PROMPT, temperature=1.0, seed=seed, **more) for seed in (1, 1, 2)]
    state = {name: tensor.tolist() for name, tensor in pipeline.state_dict().items()}
    return trainer.next_step, trainer.leaving, losses, state, generate(pipeline, PROMPT, **more), drawn


@pytest.mark.parametrize("schedule, validation, steps", [("zb_h1", False, 3), ("zb_v", True, 4)])
def test_two_ranks_leave_together_and_sample_what_the_uncut_model_says(folder, schedule, validation, steps):
    """One rank's wish, in its third step, ends both behind it; with post-validation one step later."""
    results = run_ranks(on_a_rank, 2, schedule, folder, validation)
    assert [each[:2] for each in results] == [(steps, "rank 1 has had enough")] * 2
    assert len(results[0][2]) == steps
    whole = gpt().build_stage(0, 1)
    weights = {name: torch.tensor(value) for each in results for name, value in each[3].items()}
    whole.load_state_dict(weights)
    assert results[0][4] == results[1][4] == greedy(whole, 20)
    first, again, other = results[0][5]
    assert first == again != other
    assert results[1][5] == results[0][5]
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4][: steps // 2]
    assert all(line["prompt"] == "def f" and line["text"] for line in lines)


def test_bytes_and_tokenizer_files_give_the_text_back():
    assert Bytes().decode(Bytes().encode("größer")) == "größer"
    assert Bytes().decode([65, 300, 0xFF]) == "A<300>\ufffd"
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"def": 0, "f": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    coder = TokenizerFile(made)
    assert coder.encode("def f") == [0, 1]
    assert coder.decode([0, 1]) == "def f"


def test_a_prompt_with_tokens_that_the_model_lacks_is_refused():
    check_prompt([5, 99], 100)
    check_prompt([5, 100], None)
    with pytest.raises(ValueError, match="the prompt has token 100, and the model's vocab_size is 100"):
        check_prompt([5, 100], 100)


# ---------------------------------------------------------------- BOS and EOS


def test_a_sample_ends_behind_an_end_token(folder):
    pipeline = trainer_of(0, 1, "zb_v", folder).pipeline
    more = {"max_tokens": 20, "window": WINDOW, "temperature": 1.0}
    whole = generate(pipeline, PROMPT, **more)
    place = next(n for n in range(5, 20) if whole[n] not in whole[:n])
    assert generate(pipeline, PROMPT, ends={whole[place]}, **more) == whole[: place + 1]


@pytest.mark.parametrize("named", ["by the tokenizer", "by files", "nowhere"])
def test_begin_and_end_are_those_of_transformers(named, tmp_path):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "?": 3, "<turn>": 4}, unk_token="?")
    )
    made.add_special_tokens(["<s>", "</s>"])
    if named == "by the tokenizer":
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made.save(str(tmp_path / "tokenizer.json"))
    expected = (None, frozenset())
    if named == "by the tokenizer":
        expected = (1, {2})
    if named == "by files":
        loaded = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        loaded.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
        expected = (loaded.bos_token_id, {loaded.eos_token_id, 4})
    assert begin_and_ends(made, tmp_path) == expected
    begin = expected[0]
    assert TokenizerFile(made, begin).encode("a") == ([] if begin is None else [begin]) + [0]
