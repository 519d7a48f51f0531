"""Tensor parallelism of a Hugging Face model, by the plan that the library ships for its family.

The library names modules by patterns, `model.layers.*.self_attn.q_proj`, and says in one word how each is
sharded. Here a word stands for one of torch's ParallelStyles; a word that none of them expresses is refused.
A plan may have been written for inference and give wrong gradients. So each plan is tried on a small copy of
the model, on the same mesh: logits and gradients must be those of the copy that is not sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.closeness import is_close, largest
from zbpp.models.hf.calls import BATCH, TIME
from zbpp.models.hf.cut import CutError
from zbpp.models.hf.init import constants_of, initialise
from zbpp.models.hf.shrink import build_on_meta, with_small_copy
from zbpp.models.hf.ties import aliases_of
from zbpp.models.hf.values import has_values
from zbpp.models.layers import check_divides
from zbpp.models.tensor_parallel import Styles, check_mesh, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PretrainedConfig, PreTrainedModel

_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
# Not 0, since sums over ranks have another order, and many norms compute in float32 in a float64 model.
_TOLERANCE = 1e-5


def parallelize_stage(
    stage: nn.Module, mesh: DeviceMesh, config: PretrainedConfig, seed: int, *, is_tried: bool = False
) -> None:
    """Shard a stage in place. Tied parameters stay whole.

    is_tried: whether the plan was already tried on a mesh of this size. Fake tensors are sharded without a
    trial: the processes of their mesh don't exist.
    Raises ValueError, before anything is changed, for a mesh that does not fit, a family without a plan, a
    plan that torch's styles can't express, and one that changes logits or gradients of a small copy.
    """
    check_mesh(mesh)
    text = config.get_text_config(decoder=True)
    for name in _SIZES:
        if isinstance(size := getattr(text, name, None), int):
            check_divides(name, size, "the tensor-parallel degree", mesh.size())
    plan, tied = _plan_of(build_on_meta(config))
    styles = _styles(stage, plan, tied)
    if not is_tried and all(map(has_values, stage.parameters())):
        try_out(config, mesh, seed)
    shard(stage, mesh, styles)


def _plan_of(model: PreTrainedModel) -> tuple[Mapping[str, str], set[str]]:
    """{pattern of a module's name: the library's word}, and all names of tied parameters."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise CutError(
            f"{type(model).__name__} ships no tensor-parallel plan (base_model_tp_plan): write "
            "parallel.tensor=1, or wrap the model in a class whose parallelize(stage, mesh) shards its stages"
        )
    aliases = aliases_of(model)
    return plan, {*aliases, *aliases.values()}


def _styles(model: nn.Module, plan: Mapping[str, str], tied: set[str]) -> Styles:
    """{name of each module that the plan shards: torch's style}."""
    known, styles = _known_styles(), {}
    for name, module, word in _planned(model, plan):
        if word not in known:
            raise CutError(
                f"{name}: the library's plan says {word}, which torch's tensor-parallel styles do not "
                f"express: write parallel.tensor=1 (expressed are {', '.join(known)})"
            )
        own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        style = known[word]
        if style is None or not own or tied.intersection(own):
            continue
        if word != _REPLICATED and not isinstance(module, nn.Linear | nn.Embedding):
            raise CutError(
                f"{name} is a {type(module).__name__}, and torch shards nn.Linear and nn.Embedding only: "
                "write parallel.tensor=1"
            )
        styles[name] = style()
    return styles


def _planned(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, word) of the modules in the plan, and of parameters that the plan names themselves."""
    for name, module in model.named_modules():
        if word := plan.get(_pattern(name)):
            yield name, module, word
        for leaf, _ in module.named_parameters(recurse=False):
            if word := plan.get(_pattern(f"{name}.{leaf}")):
                yield f"{name}.{leaf}", module, f"{word} for a parameter"


def _pattern(name: str) -> str:
    """The name with * in place of a layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


_REPLICATED = "replicated_with_grad_allreduce"


def _known_styles() -> dict[str, Callable[[], ParallelStyle] | None]:
    """{the library's word: a torch style that does the same, or None if there is nothing to do}."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def gathered() -> ParallelStyle:
        return ColwiseParallel(output_layouts=Replicate())

    def split() -> ParallelStyle:
        return RowwiseParallel(input_layouts=Replicate())

    # The norm of queries or keys, [batch, time, heads, size], over the last dimension: each rank normalises
    # its own heads. SequenceParallel takes the heads for the sequence; any dimension but the last would do.
    def within_heads() -> ParallelStyle:
        return SequenceParallel(sequence_dim=-2, use_local_output=True)

    return {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": gathered,
        "colwise_gather_output": gathered,
        "embedding_colwise": gathered,
        "rowwise_rep": split,
        "rowwise_split_input": split,
        "embedding_rowwise": gathered,  # by columns: then its gradient waits for W, see tensor_parallel.py
        _REPLICATED: within_heads,
        "replicate": None,
    }


# ---- The trial


def try_out(config: PretrainedConfig, mesh: DeviceMesh, seed: int) -> None:
    """Raises ValueError unless a sharded small copy of the model computes what the copy itself does."""
    with_small_copy(config, lambda small: _compare(small, mesh, seed))


def _compare(config: PretrainedConfig, mesh: DeviceMesh, seed: int) -> None:
    whole = build_on_meta(config)
    initialise(whole, seed, lambda name: True, constants_of(config))
    whole.eval().to(mesh.device_type, torch.float64)  # type: ignore[no-untyped-call]  # the library's
    sharded = deepcopy(whole)
    shard(sharded, mesh, _styles(sharded, *_plan_of(whole)))
    generator = torch.Generator().manual_seed(seed)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocabulary, (BATCH, TIME), generator=generator).to(mesh.device_type)
    expected, found = _trained(whole, tokens), _trained(sharded, tokens)
    least = 1e-3 * largest(expected.values())
    for name, one in expected.items():
        if name not in found or not is_close(found[name], one, _TOLERANCE, least=least):
            raise CutError(
                f"{type(whole).__name__} can't be sharded by the plan of the library: {name} of a "
                "sharded small copy is not that of the whole copy; write parallel.tensor=1"
            )


def _trained(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """{what it is: the logits, and the whole gradient of each parameter}, after one backward."""
    from torch.distributed.tensor import DTensor

    logits = model(input_ids=tokens, return_dict=True).logits
    generator = torch.Generator().manual_seed(0)
    weights: Any = torch.rand(logits.shape, generator=generator, dtype=logits.dtype) + 0.5
    logits.backward(weights.to(logits.device))
    found = {"the output": logits.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[f"the gradient of {name}"] = whole
    return found
