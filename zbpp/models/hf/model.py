"""Any causal language model of Hugging Face, cut into stages: from its config, or from a folder with weights.

Each stage runs the library's own code under the whole config, but allocates its own tensors only (cut.py).
The cut is found and checked on a small copy of the model (check.py). Needs the extra `hf`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zbpp.autograd.models.context import Context
from zbpp.models.hf.build import build_stage
from zbpp.models.hf.check import find_cut
from zbpp.models.hf.config import (
    asks_for_balance,
    quantized_as,
    read_config,
    read_folder,
    without_cache,
)
from zbpp.models.hf.cut import Cut
from zbpp.models.hf.experts import hold_exchanges, report_balance
from zbpp.models.hf.load import FolderWeights
from zbpp.models.hf.parallel import parallelize_stage
from zbpp.models.hf.quantize import KINDS, Quantization
from zbpp.models.hf.shrink import build_on_meta
from zbpp.models.hf.ties import aliases_of
from zbpp.models.layers import check_head, check_positive, token_loss
from zbpp.partition import split_layers
from zbpp.stage_api import by_last_stage, mean_over_tokens, widens_itself

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HuggingFace:
    """int64 tokens [batch, time] -> what the next stage needs -> logits [batch, time, vocab], in float32.

    Either config: a mapping with the keys of a config.json, `model_type` among them, or the path of such a
    file. Initial values are then the library's, drawn from `seed` and the names of its modules alone.
    Or path: a folder with config.json, which replaces `config`, and safetensors. Each stage reads its own
    tensors only. overrides: values for keys of that config.json. dtype: what parameters are read as; bfloat16
    goes with precision=bfloat16. strict: whether tensors that the folder lacks, or has too many of, are
    refused. quantize: nf4, fp4 or int8, in which linear layers hold their weights, which are frozen then: see
    quantize.py. quantize_options: values for keys of transformers' BitsAndBytesConfig. A folder that
    bitsandbytes has quantized already is read as it is. head: see HEADS in layers.py; auto is whole where
    logits are more than the product of a head without bias.
    `vocab_size` and `sequence_length` are those of the data. They are used where a mapping does not name
    these sizes, and must not exceed the sizes that the mapping or the file names. Where the config ties
    embeddings, or the library ties other parameters, a stage has copies of parameters of earlier stages.
    Raises ValueError for a model that is no causal language model, for data that does not fit, for a folder
    whose files are not those of its model, and for a folder with weights given as `config`.
    """

    def __init__(
        self,
        *given: NoReturn,
        config: Mapping[str, Any] | str | None = None,
        path: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        strict: bool = True,
        quantize: str | None = None,
        quantize_options: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        head: str = "auto",
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        if given:
            raise TypeError(
                "HuggingFace takes no positional argument: write path=... for a folder with weights, or "
                "config=... for a config.json, or for its keys as a dict"
            )
        data = {"vocab_size": vocab_size, "max_position_embeddings": sequence_length}
        sizes = {name: size for name, size in data.items() if size is not None}
        check_positive(**sizes)
        check_head(head)
        _check_sources(path, overrides, dtype)
        self.path = None if path is None else Path(path)
        self._dtype = _DTYPES[dtype]
        self.quantization = _quantization(
            quantize, quantize_options or {}, path, self._dtype, is_strict=strict
        )
        self._weights: FolderWeights | None = None
        if self.path is None:
            self._library_config = read_config(config or {}, sizes)
        else:
            self._library_config = read_folder(self.path, overrides or {}, sizes)
            whole = build_on_meta(self._library_config)
            if self.quantization is not None and self.quantization.is_of_folder:
                self.quantization.prepare(whole)
            self._weights = FolderWeights(self.path, whole, is_strict=strict)
            for name in (*self._weights.missing, *self._weights.surplus):
                _log.warning("%s: %s is not in both the model and the files", self.path, name)
        self._config = without_cache(self._library_config)
        self._layers_per_stage, self._seed, self._head = layers_per_stage, seed, head
        self._cuts: dict[int, Cut] = {}
        self._degrees_tried: set[int] = set()

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """Stage `index` of `num_stages`, on the CPU; nothing of other stages is allocated.

        The first call for a `num_stages` tries the cut on a small copy: about a second for eight layers.
        Raises ValueError if the stage does not exist, or, with module and reason, if the model can't be cut.
        """
        cut = self._cut(num_stages)
        if not 0 <= index < num_stages:
            raise ValueError(
                f"stage {index} does not exist: with num_stages={num_stages} write 0 to {num_stages - 1}"
            )
        is_real = torch.get_default_device().type != "meta"  # else somebody looks for shared parameters only
        if index == num_stages - 1 and is_real and self._head == "auto" and not cut.head:
            _log.warning("%s: head=whole, since %s", self._kind, cut.no_head)
        quantization = self.quantization if is_real else None
        given = self._seed, self._weights, self._dtype, self._head, quantization
        stage = build_stage(self._config, cut, index, *given)
        stage.try_parts = partial(_try_parts, stage.library_model.config, cut)
        hold_exchanges(stage)
        if asks_for_balance(self._library_config):
            report_balance(stage.library_model)
        return stage

    def tied(self) -> dict[str, str]:
        """{name of a tied parameter: its first name}, as the library ties them; see zbpp/stage_api.py."""
        return aliases_of(build_on_meta(self._config))

    def parallelize(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a stage over the ranks of a mesh with one dimension, by the library's plan for the family.

        The first call tries the plan on a small copy, on all ranks of the mesh: some seconds. Raises
        ValueError, before the stage is changed, if there is no plan, or if plan or mesh does not fit: see
        parallel.py.
        """
        is_tried = mesh.size() in self._degrees_tried
        parallelize_stage(stage, mesh, self._config, self._seed, is_tried=is_tried)
        self._degrees_tried.add(mesh.size())

    def keeps_documents_apart(self, num_stages: int) -> bool:
        """Whether the trial on a small copy found that it does; see masks.py."""
        return (0, True) not in self._cut(num_stages).refused

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each stage gets. Raises ValueError if they can't be split that way."""
        return list(map(len, self._cut(num_stages).layers))

    def check_pipeline(self, pipeline: Any) -> None:
        """See zbpp/stage_api.py: quantized weights are trained with adapters alone."""
        if self.quantization is None:
            return
        name, is_trained = self.quantization.name, any(each.requires_grad for each in pipeline.parameters())
        if not any(pipeline.place.gather(is_trained)):
            raise ValueError(
                f"{name} freezes all weights, and nothing is left to train: write finetune.lora (in "
                "your own loop: FineTuned(model, lora=...))"
            )
        if "shard" in pipeline.place.groups:
            raise ValueError(f"{name} doesn't go with shards of weights: write replicate=")

    @by_last_stage
    @mean_over_tokens
    @widens_itself
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; logits [batch, time, vocab], target [batch, time]."""
        return token_loss(output, target)

    def library_config(self) -> PretrainedConfig:
        """The library's config, for export."""
        return deepcopy(self._library_config)

    def library_name(self, name: str) -> str:
        """What the library calls the parameter or buffer of this name: the same."""
        return name

    def _cut(self, num_stages: int) -> Cut:
        if num_stages not in self._cuts:
            self._cuts[num_stages] = tried_cut(self._config, num_stages, self._layers_per_stage, self._seed)
            if self._head == "recompute" and not self._cuts[num_stages].head:
                raise ValueError(
                    f"{self._kind}: head=recompute can't be, since {self._cuts[num_stages].no_head}: write "
                    "head=whole"
                )
        return self._cuts[num_stages]

    @property
    def _kind(self) -> str:
        return str(self._config.model_type)


_tried: dict[tuple[Any, ...], Cut] = {}
"""Cuts by all that they depend on. A command makes its model several times, and ranks that are forks find
here what the first process has tried."""


def tried_cut(
    config: PretrainedConfig, num_stages: int, layers_per_stage: Sequence[int] | None, seed: int
) -> Cut:
    """The cut of a model, tried on a small copy. Raises ValueError as `find_cut` does."""
    kernels = getattr(config, "_attn_implementation", None), getattr(config, "_experts_implementation", None)
    cut = num_stages, str(layers_per_stage)
    key = (type(config), config.to_json_string(use_diff=False), *kernels, *cut, seed)
    if key not in _tried:
        start = time.perf_counter()
        _tried[key] = find_cut(config, lambda count: split_layers(count, num_stages, layers_per_stage), seed)
        seconds = time.perf_counter() - start
        _log.info("%s in %d stages: tried on a small copy, %.1f s", config.model_type, num_stages, seconds)
    return _tried[key]


def _try_parts(config: PretrainedConfig, cut: Cut, *, is_sliced: bool, context: Context | None) -> None:
    from zbpp.models.hf.trial import Parts, try_parts  # lazily: it imports transformers

    try_parts(config, cut, Parts(is_sliced, context))


def _quantization(
    kind: str | None,
    options: Mapping[str, Any],
    path: str | None,
    dtype: torch.dtype,
    *,
    is_strict: bool,
) -> Quantization | None:
    """Raises ValueError for arguments that don't fit each other."""
    given = None if path is None else quantized_as(Path(path))
    if given is not None and (kind is not None or options or not is_strict):
        raise ValueError(
            f"path={path} holds weights that are quantized already: leave quantize, quantize_options and "
            "strict out"
        )
    if given is not None and given.get("quant_method", "bitsandbytes") == "bitsandbytes":
        return Quantization.of_folder(given, dtype)
    if kind is None:
        if options:
            raise ValueError(f"quantize_options go with quantize: write one of {', '.join(KINDS)}")
        return None
    if path is None or not is_strict:
        raise ValueError(f"quantize={kind} goes with path and strict=true: it quantizes what a folder holds")
    return Quantization(kind, options, dtype)


def _check_sources(path: str | None, overrides: Mapping[str, Any] | None, dtype: str) -> None:
    """Raises ValueError for arguments that contradict each other."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype}: write one of {', '.join(_DTYPES)}")
    if path is None and (overrides or dtype != "float32"):
        raise ValueError("overrides and dtype go with path: write the values into config instead")
