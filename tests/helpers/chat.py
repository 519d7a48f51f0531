"""A small tokenizer, conversations, and a base model, made on the fly."""

import json

import tokenizers
import torch
import transformers

PLAIN = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCAB = 300


def write_tokenizer(path):
    """A tokenizer.json of bytes and a few pairs."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["hello world, what is this? it is a test."] * 3, trainer)
    made.save(str(path))


def conversation(number):
    """One to three turns; answers of very different lengths."""
    turns = []
    for turn in range(1 + number % 3):
        turns.append({"role": "user", "content": f"what is {number}?"})
        turns.append({"role": "assistant", "content": "it is " * (1 + (number * 5 + turn) % 4)})
    return turns


def write_conversations(path, count):
    """A jsonl file of `count` conversations."""
    lines = [json.dumps({"messages": conversation(number)}) + "\n" for number in range(count)]
    path.write_text("".join(lines))


def write_files(folder, **sizes):
    """base/ with weights and tokenizer.json, chats.jsonl, chat.jinja. sizes: values of the base's config."""
    torch.manual_seed(0)
    given = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    }
    config = transformers.AutoConfig.for_model("llama", **{**given, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "base")
    write_tokenizer(folder / "base" / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "base" / "tokenizer.json"), eos_token="<|end|>"
    ).save_pretrained(folder / "base")
    write_conversations(folder / "chats.jsonl", 120)
    (folder / "chat.jinja").write_text(PLAIN)
