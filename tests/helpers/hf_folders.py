"""Folders of tiny Hugging Face models with weights, and the library's own model of such a folder."""

import torch
import transformers

TOKENS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_OF_KIND = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16},
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    "mixtral": {**_SIZES, "num_key_value_heads": 4, "num_local_experts": 4},
}
_IDS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config_of(kind, **values):
    """A tiny config of the library."""
    given = {**_IDS, **_OF_KIND.get(kind, {**_SIZES, "num_key_value_heads": 2}), **values}
    return transformers.AutoConfig.for_model(kind, **given)


def saved(kind, folder, *, dtype=torch.float32, files="5GB", base=False, **values):
    """Write a model with random weights, as its makers would. base: without the head, which is tied."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **values)).to(dtype)
    for parameter in model.parameters():  # norms and biases, too, are not what a new model has
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    (model.base_model if base else model).save_pretrained(folder, max_shard_size=files)


def reference(folder, **options):
    """The library's model of a folder, in float32; with a cache it would not keep packed documents apart."""
    options = {"dtype": torch.float32, "use_cache": False, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
