"""TRL's SFTTrainer and chats, as the kit of a case of helpers.hf_trainer."""

from helpers.hf_trainer import ARGUMENTS, model_of

WORDS = ["pad", "eos", "user", "bot", "unk", *(f"w{i}" for i in range(35))]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}bot {% generation %}{{ m['content'] }} eos"
    "{% endgeneration %} {% else %}user {{ m['content'] }} {% endif %}{% endfor %}"
)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="unk"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="pad", eos_token="eos", unk_token="unk")
    made.chat_template = TEMPLATE
    return made


def chats(count, first):
    """Questions and answers of different lengths."""
    from datasets import Dataset

    rows = []
    for number in range(first, first + count):
        words = [WORDS[5 + (number * 7 + number % 3 * i) % 35] for i in range(4 + number * 5 % 9)]
        answer = {"role": "assistant", "content": " ".join(words)}
        rows.append([{"role": "user", "content": " ".join(words[:3])}, answer])
    return Dataset.from_dict({"messages": rows})


def sft(case, folder):
    """SFTTrainer and chats. Arguments that are none of SFTConfig are the Trainer's."""
    from trl import SFTConfig, SFTTrainer

    given = {**ARGUMENTS, "max_length": 64, "gradient_checkpointing": False, **case.arguments}
    more = {"peft_config": given.pop("peft_config")} if "peft_config" in given else {}
    model = given.pop("model", None) or model_of(case)
    args = SFTConfig(output_dir=f"{folder}/run", **given)
    datasets = {"train_dataset": chats(25, 0), "eval_dataset": chats(12, 40)}
    return SFTTrainer, {"model": model, "args": args, "processing_class": tokenizer(), **datasets, **more}


def lora(**options):
    from peft import LoraConfig

    given = {"r": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**{**given, **options})
