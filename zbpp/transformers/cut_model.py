"""The user's model object, cut: the pipeline that trains it, and what this rank has of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.job.errors import communicating
from zbpp.runtime import Pipeline
from zbpp.schedule import Timetable
from zbpp.transformers.replicas import Replicas
from zbpp.transformers.stages import OwnModules, keep_only


def base_of(model: Any) -> Any:
    """The library's model inside a PeftModel, or the model itself."""
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft else model


def _embeddings_of(base: Any) -> set[str]:
    """The names of the parameters of the library's embeddings, and of its head."""
    modules = [base.get_input_embeddings(), base.get_output_embeddings()]
    own = {id(each) for module in modules if module is not None for each in module.parameters()}
    return {name for name, each in base.named_parameters(remove_duplicate=False) if id(each) in own}


class CutModel:
    """One pipeline, or several beside each other, of the modules of a model object. Collective.

    model: a PreTrainedModel or PeftModel, the same on all ranks; afterwards it has the tensors of this rank's
    stages alone, and all others are on the meta device. All pipelines begin with the first one's values.
    loss: loss(logits, target); None: zbpp's own. replicas: the pipelines, over all processes of the job.
    options: of Pipeline. Raises ValueError as `OwnModules` and Pipeline do.
    """

    def __init__(
        self,
        model: nn.Module,
        timetable: Timetable,
        loss: Callable[[Tensor, Any], Tensor] | None,
        device: torch.device,
        replicas: Replicas,
        layers_per_stage: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        base = base_of(model)
        self._prefix = "" if base is model else "base_model.model."
        self.names = {id(each): name for name, each in model.named_parameters()}
        self._embeddings = _embeddings_of(base)
        stages = OwnModules(base, loss, layers_per_stage)
        self._aliases = stages.tied()
        self.pipeline = Pipeline(stages, timetable, device=device, mesh=replicas.mesh, **options)
        self.layers = stages.layer_counts(timetable.num_stages)
        keep_only(model, self.pipeline.parameters())
        self.names |= {id(each): name for name, each in model.named_parameters()}
        self.wrapped = Wrapped(model, self.pipeline)
        self._is_alone = timetable.num_ranks == 1
        if not self._is_alone:
            for each in {model, base}:
                _refuse_alone(each)
        self._group = replicas.pipeline_group()
        self._is_first = replicas.index == 0

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of what is saved, on the CPU.

        A PeftModel's part is what is trained, and the embeddings. peft saves the embeddings where adapters
        change them, or where the vocabulary was resized, and leaves them out otherwise.
        """
        state = {name: each for name, each in self.pipeline.state_dict().items() if name not in self._aliases}
        if self._prefix:
            kept = {name for name, each in self.pipeline.named_parameters() if each.requires_grad}
            kept |= self._embeddings
            state = {name: each for name, each in state.items() if name in kept}
        return {self._prefix + name: each.cpu() for name, each in state.items()}

    def merged(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of all ranks of the first pipeline, on rank 0; {} elsewhere. The first rank counts."""
        if self._is_alone or not self._is_first:
            return dict(mine) if self._is_first else {}
        rank = dist.get_rank()
        parts: list[Any] | None = [None] * self.pipeline.timetable.num_ranks if rank == 0 else None
        with communicating(f"rank {rank}, gathering a checkpoint: all ranks must call save_model"):
            dist.gather_object(dict(mine), parts, dst=0, group=self._group)
        return {name: each for part in reversed(parts or []) for name, each in part.items()}

    def from_last(self, value: Any) -> Any:
        """What the last stage's rank has, on all ranks."""
        if self._is_alone:
            return value
        values = [value]
        with communicating(f"rank {dist.get_rank()}, waiting for the last stage's rank"):
            source = self.pipeline.timetable.rank_of[-1]
            dist.broadcast_object_list(values, group_src=source, group=self._group)
        return values[0]

    def gather(self, numbers: Tensor) -> list[Tensor]:
        """The tensors of all ranks of the pipeline, on each of them; they have one shape and dtype."""
        everyone = [torch.empty_like(numbers) for _ in range(self.pipeline.timetable.num_ranks)]
        if self._is_alone:
            return [numbers]
        with communicating(f"rank {dist.get_rank()}, gathering the loss of a step"):
            dist.all_gather(everyone, numbers, group=self.pipeline.group)
        return everyone


class Wrapped(nn.Module):
    """What the Trainer holds as the wrapped model: the user's model object. The pipeline runs its modules."""

    def __init__(self, model: nn.Module, pipeline: Pipeline) -> None:
        super().__init__()
        self.module = model
        self._stages = tuple(pipeline.stages.values())

    def train(self, mode: bool = True) -> Wrapped:
        """Set the mode of the stages, too: they have copies of the modules above the layers."""
        super().train(mode)
        for each in self._stages:
            each.train(mode)
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(_ALONE["forward"])


_ALONE = {
    "forward": "no rank has the whole model, so it has no forward: write trainer.predict or trainer.evaluate",
    "generate": "no rank has the whole model, so it does not generate: load what trainer.save_model has "
    "written, in one process",
    "save_pretrained": "no rank has the whole model to save: call trainer.save_model(folder) on all ranks",
}


def _refuse_alone(model: Any) -> None:
    """Let a model object, of which a rank has a part, raise RuntimeError where all of it is needed.

    The Trainer itself calls save_pretrained, with the tensors of all ranks as state_dict.
    """
    for name, text in _ALONE.items():
        setattr(model, name, _refused(getattr(model, name), text))


def _refused(method: Callable[..., Any], text: str) -> Callable[..., Any]:
    @wraps(method)  # the Trainer reads the arguments of forward
    def refused(*args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        if state_dict is None:
            raise RuntimeError(text)
        return method(*args, state_dict=state_dict, **kwargs)

    return refused
