"""Any causal language model of Hugging Face, from its config: cut into stages, with new initial weights.

Each stage runs the library's own code under the whole config, but allocates its own tensors only (`hf_cut`).
The cut is found and checked on a small copy of the model (`hf_check`). Needs the extra `hf`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zbpp.models.hf_check import build_stage, find_cut
from zbpp.models.hf_cut import Cut
from zbpp.models.hf_parallel import parallelize_stage
from zbpp.models.hf_shrink import build_on_meta
from zbpp.models.hf_ties import aliases_of
from zbpp.models.layers import check_positive, token_loss
from zbpp.partition import split_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


class HuggingFace:
    """int64 tokens [batch, time] -> what the next stage needs -> logits [batch, time, vocab], in float32.

    config: a mapping with the keys of a config.json, `model_type` among them, or the path of such a file.
    `vocab_size` and `sequence_length` are those of the data. They are used where a mapping does not name
    these sizes, and must not exceed the sizes that the mapping or the file names. Initial values are the
    library's, drawn from `seed` and the names of its modules alone. Where the config ties embeddings, or
    the library ties other parameters, a stage has copies of what stages before it have.
    Raises ValueError for a model that is no causal language model, for data that does not fit, and for a
    folder with weights, which are not loaded.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | str,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        data = {"vocab_size": vocab_size, "max_position_embeddings": sequence_length}
        sizes = {name: size for name, size in data.items() if size is not None}
        check_positive(**sizes)
        self._config = _read(config, sizes)
        self._layers_per_stage, self._seed = layers_per_stage, seed
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
        return build_stage(self._config, cut, index, self._seed)

    def tied(self) -> dict[str, str]:
        """{name of a tied parameter: its first name}, as the library ties them; see zbpp/stage_api.py."""
        return aliases_of(build_on_meta(self._config))

    def parallelize(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a stage over the ranks of a mesh with one dimension, by the library's plan for the family.

        The first call tries the plan on a small copy, on all ranks of the mesh: some seconds. Raises
        ValueError, before the stage is changed, if there is no plan, or if plan or mesh does not fit: see
        hf_parallel.py.
        """
        is_tried = mesh.size() in self._degrees_tried
        parallelize_stage(stage, mesh, self._config, self._seed, is_tried=is_tried)
        self._degrees_tried.add(mesh.size())

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each stage gets. Raises ValueError if they can't be split that way."""
        return list(map(len, self._cut(num_stages).layers))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; logits [batch, time, vocab], target [batch, time]."""
        return token_loss(output, target)

    def _cut(self, num_stages: int) -> Cut:
        if num_stages not in self._cuts:
            start = time.perf_counter()
            self._cuts[num_stages] = find_cut(
                self._config,
                lambda num_layers: split_layers(num_layers, num_stages, self._layers_per_stage),
                self._seed,
            )
            seconds = time.perf_counter() - start
            _log.info("%s in %d stages: tried on a small copy, %.1f s", self._kind, num_stages, seconds)
        return self._cuts[num_stages]

    @property
    def _kind(self) -> str:
        return str(self._config.model_type)


def _read(config: Mapping[str, Any] | str, sizes: Mapping[str, int]) -> PretrainedConfig:
    """The library's config. sizes: those of the data, by the names that a config has for them."""
    from transformers import AutoConfig, PretrainedConfig  # lazily: three seconds, and optional

    if isinstance(config, str):
        _refuse_weights(Path(config))
    given = PretrainedConfig.get_config_dict(config)[0] if isinstance(config, str) else dict(config)
    if "model_type" not in given:
        raise ValueError("config has no model_type: write one of Hugging Face's, such as llama")
    known: dict[str, Any] = given
    if not isinstance(config, str):  # a size that a file does not name is the library's default
        known = {**_open_ones(AutoConfig.for_model(given["model_type"]), given, sizes), **given}
    made = AutoConfig.for_model(**known)
    text = made.get_text_config(decoder=True)
    made.use_cache = text.use_cache = False
    for name, size in sizes.items():
        _refuse_misfit(name, size, getattr(text, name, None))
    return made


def _open_ones(
    default: PretrainedConfig, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The sizes that a config of this family has, and that `given` does not name."""
    own_names = default.attribute_map
    return {
        name: size
        for name, size in sizes.items()
        if hasattr(default, name) and name not in given and own_names.get(name, name) not in given
    }


def _refuse_misfit(name: str, size: int, says: Any) -> None:
    if isinstance(says, int) and size > says:
        ours = {"max_position_embeddings": "sequence_length"}.get(name, name)
        raise ValueError(
            f"{ours}={size} is more than the config's {name}={says}: write {ours}={says} or less, or "
            f"config.{name}={size}"
        )


def _refuse_weights(path: Path) -> None:
    """Raises ValueError for a folder with weights: its user expects them to be loaded."""
    if not path.is_dir():
        return
    found = sorted(each.name for pattern in _WEIGHTS for each in path.glob(pattern))
    if found:
        raise ValueError(
            f"config={path} holds weights ({found[0]}), and this model starts from random ones: loading "
            f"them comes in a later version; write config={path / 'config.json'} to take the config alone"
        )
