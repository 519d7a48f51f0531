#!/usr/bin/env python
"""Print which causal language models of Hugging Face can be cut into 2 and 4 stages, and why others can't.

It tries every family that AutoModelForCausalLM knows, with the sizes of its own config class made narrow, and
with eight layers where their number can be chosen. "equal" means: the stages, one after the other, give the
uncut model's logits and gradients, in float64 (in float32 for models that run in no other dtype). Embeddings
are not tied.

--loaded goes the whole way with weights: a small model of the family, with the ties of its config class, is
saved by the library; each stage reads its own tensors; logits and gradients are compared with the library's
from_pretrained; the stages are trained for five steps by a Pipeline, and exported as `zbpp export` does; the
library loads that folder, and its logits are compared with the stages'. The table also says what masks and
packed sequences the family takes (2d: padding; ids: positions that begin again; 4d: a mask of blocks, too).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
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
        return all(answer.startswith("equal") for answer in self.answers)


def cut(family: str, settings: Mapping[str, Any]) -> Row:
    """Try the family in each number of stages."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return Row(family, [_answer(family.split()[0], settings, num) for num in STAGES])


def _answer(kind: str, settings: Mapping[str, Any], num_stages: int) -> str:
    from zbpp.models.hf.check import find_cut
    from zbpp.models.layers import split_layers

    try:
        config = config_of(kind, settings)
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


def go_round(family: str, settings: Mapping[str, Any]) -> Row:
    """Load the family in each number of stages, train and export it."""
    import torch
    import transformers

    from zbpp.models.hf.cut import CutError
    from zbpp.models.hf.shrink import with_small_copy

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kind = family.split()[0]
    few = {} if settings or kind in SETTINGS else {"num_hidden_layers": max(STAGES)}
    try:
        config = config_of(kind, {**few, **settings}, is_tied=True)
    except Exception as error:  # whatever a config class may raise
        return Row(family, [f"no config: {one_line(error)}"] * len(STAGES))
    try:
        return Row(family, with_small_copy(config, _round_trips))
    except CutError as error:
        return Row(family, [f"refused: {one_line(error)}"] * len(STAGES))
    except Exception as error:  # the library itself can't build, save or load the model
        return Row(family, [f"no model: {type(error).__name__}: {one_line(error)}"] * len(STAGES))


def _round_trips(config: Any) -> list[str]:
    """The answer for each number of stages. config: of a small model."""
    with tempfile.TemporaryDirectory() as folder:
        return _round_trips_in(Path(folder), config)


def _round_trips_in(folder: Path, config: Any) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM

    from zbpp.models.hf import HuggingFace
    from zbpp.models.hf.cut import CutError

    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(config)
    for parameter in source.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
    source.save_pretrained(folder / "model")
    config.save_pretrained(folder / "model")  # the model's own is a part of it in some families
    whole = _by_the_library(folder / "model")
    text = config.get_text_config(decoder=True)
    tokens = torch.randint(text.vocab_size, (4, 8), generator=torch.Generator().manual_seed(1))
    model = HuggingFace(path=str(folder / "model"))
    model._config._experts_implementation = "eager"
    answers = []
    for num_stages in STAGES:
        try:
            answers.append(_round_trip(model, whole, folder / str(num_stages), num_stages, tokens))
        except CutError as error:  # after any other error a copy with other sizes is tried
            answers.append(f"refused: {one_line(error)}")
    return answers


def _by_the_library(folder: Path) -> Any:
    """The library's own model. Without grouped products, which take neither float64 nor odd sizes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    for each in (config, config.get_text_config(decoder=True)):
        each.use_cache, each._experts_implementation = False, "eager"
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def _round_trip(model: Any, whole: Any, folder: Path, num_stages: int, tokens: Any) -> str:
    """`equal`, and the kinds of batches; or what differs."""
    import torch

    stages = [model.build_stage(index, num_stages).eval() for index in range(num_stages)]
    if different := _difference(whole, stages, tokens):
        return f"loaded: {different}"
    stages = _trained(model, num_stages, tokens, folder / "run")
    _exported(model, folder)
    loaded = _by_the_library(folder / "exported")
    with torch.no_grad():
        expected = loaded(input_ids=tokens, return_dict=True).logits
        found = _logits(stages, tokens)
    scale = float(expected.abs().max())
    if not torch.allclose(found, expected, rtol=0, atol=1e-6 * scale):
        return f"exported: logits differ by {float((found - expected).abs().max()) / scale:.1e}"
    refused = model._cut(num_stages).refused
    kinds = {"2d": (2, False), "ids": (0, True), "4d": (4, True)}
    return "equal " + " ".join(
        name if kind not in refused else "-" * len(name) for name, kind in kinds.items()
    )


def _difference(whole: Any, stages: Sequence[Any], tokens: Any) -> str:
    """What of logits and gradients differs; nothing if all are equal."""
    import torch

    from zbpp.models.hf.ties import aliases_of, summed_gradients

    failed = ""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        one, others = deepcopy(whole).to(dtype), [deepcopy(stage).to(dtype) for stage in stages]
        try:
            expected = one(input_ids=tokens, return_dict=True).logits
            found = _logits(others, tokens)
        except RuntimeError as error:  # some models run in float32 only
            failed = one_line(error)
            continue
        weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(2)).to(expected.dtype)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        sums = summed_gradients(others, aliases_of(one))
        rows = {name: (sums.get(name), each.grad) for name, each in one.named_parameters()}
        for name, (mine, other) in {"logits": (found, expected), **rows}.items():
            if mine is None or other is None:
                if (mine is not None and mine.any()) or (other is not None and other.any()):
                    return f"{name} has no gradient on one side"
            elif not torch.allclose(
                mine, other, rtol=0, atol=tolerance * max(float(other.abs().max()), 1e-9)
            ):
                return f"{name} differs"
        return ""
    raise RuntimeError(f"runs in neither float64 nor float32: {failed}")


def _logits(stages: Sequence[Any], tokens: Any) -> Any:
    output: Any = (tokens,)
    for stage in stages:
        output = stage(*output)
        output = output if isinstance(output, tuple) else (output,)
    return output[0]


def _trained(model: Any, num_stages: int, tokens: Any, run: Path) -> list[Any]:
    """The stages after five steps of a Pipeline, in eval mode; their weights are saved as a run's."""
    import torch

    from zbpp.planning import plan
    from zbpp.runtime import Pipeline
    from zbpp.training.weights import save_weights

    timetable = plan("interleaved_1f1b", 1, 2, stages_per_rank=num_stages)
    pipeline = Pipeline(model, timetable)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        pipeline.step(tokens, target=tokens.roll(-1, 1))
        torch.nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0)
        optimizer.step()
    save_weights(run, pipeline)
    stages = [pipeline.stages[index].eval() for index in range(num_stages)]
    pipeline.close()
    return stages


def _exported(model: Any, folder: Path) -> None:
    from zbpp.models.hf.export import write_folder
    from zbpp.training.weights import weights_of_run

    saved = weights_of_run(folder / "run")
    (folder / "exported").mkdir()
    write_folder(
        folder / "exported",
        model.library_config(),
        list(saved.names),
        saved.read,
        dtype=None,
        file_size="1MB",
    )


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def table(rows: Sequence[Row]) -> str:
    """The rows as text. An answer other than "equal" that holds for both numbers of stages is shown once."""
    width = 12 if all("equal " not in answer for row in rows for answer in row.answers) else 18
    lines = [f"{'family':54}{'2 stages':{width}}4 stages"]
    for family, (two, four) in rows:
        if two == four and not two.startswith("equal"):
            lines.append(f"{family:54}{two}")
        else:
            lines.append(f"{family:54}{two:{width - 1}} {four}")
    return "\n".join(lines) + "\n"


def main() -> None:
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as families

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="such as llama gpt2; all by default")
    parser.add_argument(
        "--loaded", action="store_true", help="with weights: loaded, trained, exported, loaded"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="a file for the table, too")
    options = parser.parse_args()
    cases = [(family, {}) for family in families] + list(VARIANTS.items())
    if options.families:
        cases = [case for case in cases if case[0].split()[0] in options.families]
    mode = " --loaded" if options.loaded else ""
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        found = pool.map(go_round if options.loaded else cut, *zip(*cases, strict=True))
        for row in track(found, "families", total=len(cases), transient=True):
            rows.append(row)
            if options.out:  # after each family, since all of them take up to an hour
                options.out.write_text(report(rows, __version__, mode))
    print(report(rows, __version__, mode), end="")


def report(rows: Sequence[Row], version: str, mode: str) -> str:
    """The count of equal families, the variants left out, and the table."""
    families = [row for row in rows if " " not in row.family]
    equal = sum(row.is_equal for row in families)
    return (
        f"$ python scripts/dev/hf_families.py{mode}     (transformers {version}: {len(families)} families, "
        f"{equal} equal in 2 and in 4 stages)\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
