#!/usr/bin/env python
"""Print which causal language models of Hugging Face can be cut into 2 and 4 stages, and why others can't.

It tries every family that AutoModelForCausalLM knows, with the sizes of its own config class made narrow, and
with eight layers where their number can be chosen. "equal" means: the stages, one after the other, give the
uncut model's logits and gradients, in float64 (in float32 for models that run in no other dtype). Embeddings
are not tied; --tied tries the families whose config class ties them, with all that they tie.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

NUM_LAYERS = 8
STAGES = (2, 4)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ATTENTION = ["conv", "full_attention"] * (NUM_LAYERS // 2)
_MOE = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}

# Settings that a config class lacks, or has with values of which the library can't make a model.
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {**_MOE, "n_group": 1, "topk_group": 1},
    "dots1": _MOE,
    "falcon_h1": {"hidden_size": 64, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
                  "vocab_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "mamba_chunk_size": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": _ATTENTION},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 54},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "prophetnet": {"num_encoder_layers": NUM_LAYERS, "num_decoder_layers": NUM_LAYERS},
}  # fmt: skip

# Variants that an earlier version cut wrongly.
VARIANTS: dict[str, dict[str, Any]] = {
    "granite embedding_multiplier=12": {"embedding_multiplier": 12.0, "residual_multiplier": 0.2},
    "deepseek_v3 first_k_dense_replace=3": {"first_k_dense_replace": 3},
    "qwen2_moe mlp_only_layers=[5] decoder_sparse_step=2": {"mlp_only_layers": [5], "decoder_sparse_step": 2},
    "qwen3_moe mlp_only_layers=[5] decoder_sparse_step=2": {"mlp_only_layers": [5], "decoder_sparse_step": 2},
    "gpt2 scale_attn_by_inverse_layer_idx=true": {"scale_attn_by_inverse_layer_idx": True},
    "opt word_embed_proj_dim=512": {"word_embed_proj_dim": 512},
}


class Row(NamedTuple):
    """A family, and the result of cutting it into each number of STAGES."""

    family: str
    answers: Sequence[str]

    @property
    def is_equal(self) -> bool:
        return all(answer == "equal" for answer in self.answers)


def cut(family: str, settings: Mapping[str, Any], is_tied: bool) -> Row:
    """Try the family in each number of stages."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return Row(family, [_answer(family.split()[0], settings, is_tied, num) for num in STAGES])


def _answer(kind: str, settings: Mapping[str, Any], is_tied: bool, num_stages: int) -> str:
    from zbpp.models.hf_check import find_cut
    from zbpp.models.layers import split_layers

    try:
        config = config_of(kind, settings, is_tied)
    except Exception as error:  # whatever a config class may raise
        return f"no config: {one_line(error)}"
    try:
        find_cut(config, lambda num_layers: split_layers(num_layers, num_stages), seed=0)
    except ValueError as error:
        return f"refused: {one_line(error)}"
    except Exception as error:  # the library itself can't build or run the model
        return f"no model: {type(error).__name__}: {one_line(error)}"
    return "equal"


def config_of(kind: str, settings: Mapping[str, Any], is_tied: bool = False) -> Any:
    """A config of this kind: causal, without a cache. is_tied: with the ties of its config class."""
    from transformers import AutoConfig

    given = {**SETTINGS.get(kind, {}), **settings}
    try:
        config = AutoConfig.for_model(kind, **{"num_hidden_layers": NUM_LAYERS, **given})
    except Exception:  # some families have another name for the number of layers
        config = AutoConfig.for_model(kind, **given)
    text = config.get_text_config(decoder=True)
    for each in (config, text):
        each.use_cache = False
        if not is_tied:
            each.tie_word_embeddings = False
        if hasattr(each, "is_decoder"):
            each.is_decoder = True
    return config


def ties(kind: str) -> bool:
    """Whether the config class of this kind ties embeddings."""
    try:
        config = config_of(kind, {}, is_tied=True)
    except Exception:  # whatever a config class may raise
        return False
    texts = (config, config.get_text_config(decoder=True))
    return any(getattr(each, "tie_word_embeddings", False) for each in texts)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def table(rows: Sequence[Row]) -> str:
    """The rows as text. An answer other than "equal" that holds for both numbers of stages is shown once."""
    lines = [f"{'family':54}{'2 stages':12}4 stages"]
    for family, (two, four) in rows:
        if two == four != "equal":
            lines.append(f"{family:54}{two}")
        else:
            lines.append(f"{family:54}{two:11} {four}")
    return "\n".join(lines) + "\n"


def main() -> None:
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as families

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="such as llama gpt2; all by default")
    parser.add_argument("--tied", action="store_true", help="families that tie embeddings, with their ties")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="a file for the table, too")
    options = parser.parse_args()
    cases = [(family, {}) for family in families] + list(VARIANTS.items())
    if options.tied:
        cases = [(family, {}) for family in families if ties(family)]
    if options.families:
        cases = [case for case in cases if case[0].split()[0] in options.families]
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        found = pool.map(cut, *zip(*cases, strict=True), [options.tied] * len(cases))
        for row in track(found, "families", total=len(cases), transient=True):
            rows.append(row)
            if options.out:  # after each family, since all of them take up to an hour
                options.out.write_text(report(rows, __version__, is_tied=options.tied))
    print(report(rows, __version__, is_tied=options.tied), end="")


def report(rows: Sequence[Row], version: str, *, is_tied: bool) -> str:
    """The count of equal families, the variants left out, and the table."""
    families = [row for row in rows if " " not in row.family]
    equal = sum(row.is_equal for row in families)
    mode = " --tied" if is_tied else ""
    return (
        f"$ python scripts/dev/hf_families.py{mode}     (transformers {version}: {len(families)} families, "
        f"{equal} equal in 2 and in 4 stages)\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
