"""Conversations against transformers' own template and mask; the loss against one mean over all targets."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh, plan
from zbpp.data.source import parts_of
from zbpp.models.llama import Llama
from zbpp.run.data import limit_evaluation
from zbpp.stage_api import IGNORED

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from helpers.chat import PLAIN, conversation, write_conversations, write_tokenizer  # noqa: E402
from zbpp.data.chat import chat_data  # noqa: E402  # needs transformers
from zbpp.data.chat_template import MARKS, encode, load_chat_tokenizer  # noqa: E402

MARKED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LENGTH, ROWS, M = 48, 4, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with tokenizer.json and chats.jsonl."""
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder / "tokenizer.json")
    write_conversations(folder / "chats.jsonl", 24)
    return folder


def data_of(files, **options):
    sizes = {"batch_size": ROWS, "seed": 0, "sequence_length": LENGTH, "vocab_size": 300}
    paths = {"path": str(files / "chats.jsonl"), "tokenizer": str(files / "tokenizer.json")}
    return chat_data(**{"chat_template": PLAIN, "held_out": 0.25} | sizes | paths | options)


# ---------------------------------------------------------------- tokens and mask


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("number", range(4))
def test_the_assistants_tokens_are_those_of_transformers_mask(files, template, number):
    """A template without {% generation %} gives what transformers finds in one that has it."""
    tokenizer = load_chat_tokenizer(str(files / "tokenizer.json"), template)
    messages = [{"role": "system", "content": "be kind"}, *conversation(number)]
    tokens, is_target = encode(tokenizer, messages)
    expected = tokenizer.apply_chat_template(
        messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.tolist() == expected["input_ids"]
    assert is_target.tolist() == expected["assistant_masks"]
    text = tokenizer.decode(tokens[is_target == 1])
    assert text.count("it is") == sum(m["content"].count("it is") for m in messages)
    assert "what" not in text


def test_a_template_that_changes_earlier_text_is_refused(files):
    """As templates do that drop the reasoning of earlier answers."""
    template = "{{ messages | length }}" + PLAIN
    tokenizer = load_chat_tokenizer(str(files / "tokenizer.json"), template)
    with pytest.raises(ValueError, match="generation"):
        encode(tokenizer, conversation(1))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_message_that_is_marked_as_not_to_be_learned_is_no_target(files, template):
    """OpenAI's and Mistral's weight, axolotl's train, ms-swift's loss, slime's step_loss_mask were ignored.

    The reference is a template that leaves such messages out of its spans.
    """
    tokenizer = load_chat_tokenizer(str(files / "tokenizer.json"), template)
    for key in MARKS:
        messages = conversation(2)  # three answers
        messages[1][key], messages[3][key], messages[5][key] = 1, 0, None
        expected = tokenizer.apply_chat_template(
            messages,
            chat_template=MARKED.replace("== 'assistant' %", f"== 'assistant' and m['{key}'] != 0 %"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found = encode(tokenizer, messages)
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.is_target.tolist() == expected["assistant_masks"]
        assert 0 < found.is_target.sum() < encode(tokenizer, conversation(2)).is_target.sum()


USING_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}thinking{% endif %}" + MARKED
)


def test_the_template_gets_the_tools_and_switches_of_a_line_and_a_run_names_keys_that_nobody_reads(
    files, tmp_path
):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    given = [
        ({"tools": tools, "enable_thinking": True}, {"tools": tools, "enable_thinking": True}),
        ({"tools": json.dumps(tools)}, {"tools": tools}),  # a column of a table
        ({"chat_template_kwargs": {"enable_thinking": True}, "tools": None}, {"enable_thinking": True}),
        ({"id": 7, "documents": [{"title": "a", "text": "b"}], "source": None}, {}),
    ]
    question, answer = conversation(0)
    messages = [{**question, "train": 1}, {**answer, "weight": 1, "name": "bot"}]
    lines = [json.dumps({"messages": messages, **keys}) + "\n" for keys, _ in given]
    (tmp_path / "tools.jsonl").write_text("".join(lines))
    options = {"sequence_length": 500, "held_out": 0.0, "chat_template": USING_TOOLS}
    data = data_of(files, path=str(tmp_path / "tools.jsonl"), **options)
    tokenizer = load_chat_tokenizer(str(files / "tokenizer.json"), USING_TOOLS)
    expected = [tokenizer.apply_chat_template(messages, **keys)["input_ids"][:-1] for _, keys in given]
    found = data.train.sequences(iter)
    assert sorted(found.sequence(number)[0].tolist() for number in range(4)) == sorted(expected)
    assert data.notes[1:] == (
        "keys that neither zbpp nor the chat template reads, in so many lines: documents 1, id 1, name of a "
        "message of assistant 4, train of a message of user 4",
    )


ENDED = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def test_the_special_tokens_are_those_of_the_tokenizers_folder(files, tmp_path, caplog):
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(files / "tokenizer.json"), bos_token="<|start|>", eos_token="<|end|>"
    )
    saved.save_pretrained(tmp_path)
    expected = saved.apply_chat_template(
        conversation(1), chat_template=ENDED, return_dict=True, return_assistant_tokens_mask=True
    )
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        found = encode(load_chat_tokenizer(str(name), ENDED), conversation(1))
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.is_target.tolist() == expected["assistant_masks"]
        assert (found.tokens[0], found.tokens[-1]) == (saved.bos_token_id, saved.eos_token_id)
    assert not caplog.text
    load_chat_tokenizer(str(files), ENDED)
    assert "the chat template names eos_token, which" in caplog.text


def test_targets_are_the_next_tokens_of_the_assistant_alone(files):
    train = data_of(files).train
    tokenizer = load_chat_tokenizer(str(files / "tokenizer.json"), PLAIN)
    inputs, labels = train.batch(0)
    assert inputs.shape == labels.shape == (ROWS, LENGTH)
    for row in range(ROWS):
        places = (labels[row] != IGNORED).nonzero().flatten()
        assert "what" not in tokenizer.decode(labels[row, places])
        inner = places[places + 1 < LENGTH]
        followed = inner[torch.isin(inner + 1, places)]
        assert torch.equal(labels[row, followed], inputs[row, followed + 1])
    assert torch.equal(data_of(files).train.batch(5)[0], train.batch(5)[0])
    rows = torch.cat([train.batch(step)[0] for step in range(9)])  # two epochs of 18
    assert len(set(map(tuple, rows[:18].tolist()))) == 18


@pytest.mark.parametrize("length", [1000, 40, 24])
def test_rows_are_as_long_as_the_longest_conversation_and_the_run_says_what_is_cut(files, length):
    """Conversations of 422 tokens were cut at 64, without a word."""
    tokenizer = load_chat_tokenizer(str(files / "tokenizer.json"), PLAIN)
    masks = [encode(tokenizer, conversation(number)).is_target[1:] for number in range(24)]
    longest, targets = max(map(len, masks)), sum(int(each.sum()) for each in masks)
    kept = [each for each in masks if each[:length].any()]
    row = min(length, -(-longest // 8) * 8)
    found = data_of(files, sequence_length=length, held_out=0.0, batch_size=len(kept))
    inputs, labels = found.train.batch(0)
    assert inputs.shape == labels.shape == (len(kept), row)
    assert int((labels != IGNORED).sum()) == sum(int(each[:length].sum()) for each in kept)
    tokens = sum(min(len(each), length) for each in kept)
    assert found.items_per_batch == len(kept) * length
    assert found.filled_items == pytest.approx(tokens)  # what tokens per second count

    share = f"rows of {row} tokens, {100 - 100 * tokens / (len(kept) * row):.0f} % of them padding"
    expected = [f"{len(kept)} conversations to train on, 0 held out; {share}"]
    cut = [each for each in masks if len(each) > length]
    if cut:
        lost = sum(int(each[length:].sum()) for each in cut)
        expected.append(
            f"{len(cut)} of 24 are cut at model.sequence_length={length}; {lost} of {targets} targets are "
            f"lost; the longest conversation asks for {longest}"
        )
    if left_out := 24 - len(kept):
        expected.append(f"{left_out} conversations are left out: nothing to learn in the first {length}")
    assert list(found.notes) == expected


# ---------------------------------------------------------------- the loss


def model():
    return Llama(
        vocab_size=300,
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        intermediate_size=16,
        sequence_length=LENGTH,
    )


def expected_gradients(train, num_parts):
    """One mean over all targets of all replicas, by plain autograd."""
    whole = model().build_stage(0, 1).double()
    batches = [train.batch(number) for number in range(num_parts)]
    inputs = torch.cat([inputs for inputs, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    loss = F.cross_entropy(whole(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in whole.named_parameters()}


def by_pipeline(rank, train, num_parts):
    timetable = plan("zb_v", 1, M)
    stages = {i: model().build_stage(i, 2).double() for i in range(2)}
    mesh = make_mesh(replicate=num_parts) if num_parts > 1 else None
    with Pipeline(stages, timetable, model().loss, mesh=mesh) as pipeline:
        inputs, target = parts_of(train.batch(rank))
        losses = pipeline.step(*inputs, target=target)
        mean = sum(float(each) for each in losses) / len(losses)
        return mean, {name: each.grad for name, each in pipeline.named_parameters()}


def test_the_loss_is_the_mean_over_all_targets_of_the_batch_whatever_the_microbatches(files):
    train = limit_evaluation(data_of(files), 0, 1, 1, 4).train
    labels = train.batch(0)[1]
    counts = [(each != IGNORED).sum().item() for each in labels.split(ROWS // M)]
    assert counts[0] != counts[1]
    found, gradients = by_pipeline(0, train, 1)
    loss, expected = expected_gradients(train, 1)
    assert found == pytest.approx(loss, rel=1e-12)
    for name, each in expected.items():
        torch.testing.assert_close(gradients[name], each, rtol=1e-9, atol=1e-12, msg=name)


def test_it_is_the_mean_over_all_targets_of_all_replicas(files):
    train = limit_evaluation(data_of(files), 0, 1, 2, 4).train
    results = run_ranks(by_pipeline, 2, train, 2)
    loss, expected = expected_gradients(train, 2)
    assert sum(mean for mean, _ in results) / 2 == pytest.approx(loss, rel=1e-12)
    assert abs(results[0][0] - loss) > 1e-6  # a replica's own mean is another number
    for name, each in expected.items():
        for _, gradients in results:
            torch.testing.assert_close(gradients[name], each, rtol=1e-9, atol=1e-12, msg=name)


# ---------------------------------------------------------------- bad input


ANSWER = '{"role": "assistant", "content": "a"}'


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("not json\n", {}, "line 1: JSONDecodeError"),
        ('\n{"messages": [{"content": "a"}]}\n', {}, "line 2: KeyError: 'role'; write {\"messages\""),
        ("\n", {}, "has no conversation"),
        (f'{{"messages": [{ANSWER}]}}\n', {}, "can't be told apart (it has the first message"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            {},
            "no conversation has an assistant's token",
        ),
        (f'{{"messages": [{{"role": "user", "content": ""}}, {ANSWER}]}}\n', {}, "and a batch takes 4"),
        (
            f'{{"messages": [{{"role": "user", "content": ""}}, {ANSWER[:-1]}, "weight": 0.5}}]}}\n',
            {},
            "a message has weight=0.5: write 0 (not learned) or 1 (learned)",
        ),
        (
            f'{{"messages": [{{"role": "user", "content": ""}}, {ANSWER[:-1]}, "weight": 0}}]}}\n',
            {
                "chat_template": MARKED.replace(
                    "{{ m['content'] }}<|end|>", "{% endgeneration %}{% generation %}", 1
                )
            },
            "1 messages of the assistant have 0 spans",
        ),
        (None, {"chat_template": None}, "no chat template"),
        (None, {"vocab_size": 100}, "vocab_size=100 is smaller"),
        (None, {"sequence_length": 2}, "larger model.sequence_length"),
        (None, {"held_out": 1.0}, "write 0.0 to 0.99"),
        (None, {"tokenizer": "nowhere"}, "tokenizer=nowhere does not exist"),
        (None, {"tokenizer": str(Path(__file__).parent)}, "holds no tokenizer that transformers loads"),
        (None, {"chat_template": "nowhere.jinja"}, "chat_template=nowhere.jinja is not a file"),
    ],
)
def test_what_does_not_fit_is_refused(files, tmp_path, text, options, words):
    if text is not None:
        (tmp_path / "bad.jsonl").write_text(text)
        options = {"path": str(tmp_path / "bad.jsonl"), "held_out": 0.0, **options}
    with pytest.raises(ValueError) as caught:
        data_of(files, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
