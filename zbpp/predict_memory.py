"""What each rank of a configured training run will hold: predicted before anything runs.

Each stage is built on fake tensors, which have shapes and no memory. There it runs F, B and W of a microbatch
and an optimizer step. Where a stage can't run on fake tensors, it runs really, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.autograd.storages import storages_of
from zbpp.builders.data import build_data
from zbpp.builders.model import build_model, explained_as_data
from zbpp.builders.optimizer import build_optimizer
from zbpp.builders.parallel import build_mesh, pipeline_ranks, split_stages
from zbpp.builders.plan import build_timetable, check_layers
from zbpp.builders.stages import recompute_stages
from zbpp.config import ConfigError, ParallelConfig, TrainConfig, naming
from zbpp.planning.memory_budget import RankMemory, StageBytes, predict_memory, sharded
from zbpp.runtime.blocks import blocks_of
from zbpp.runtime.layout import layout_of
from zbpp.runtime.live_tensors import LiveTensors
from zbpp.runtime.microbatch import into_microbatches
from zbpp.runtime.microbatch_memory import MicrobatchMemory, microbatch_memory
from zbpp.runtime.world import fake_world
from zbpp.schedule import Timetable
from zbpp.training.batch import batch_for
from zbpp.training.master_weights import MasterWeights
from zbpp.training.parameter_groups import Named
from zbpp.training.precision import PRECISIONS

FAKE = "on fake tensors: no memory was needed"
REAL = "by one microbatch on the CPU"


class Prediction(NamedTuple):
    """stages: the bytes of each. ranks: their step. how: what the stages ran on, and why if really."""

    timetable: Timetable
    stages: list[StageBytes]
    ranks: list[RankMemory]
    how: str


class MeasuredStages(NamedTuple):
    """batch: bytes of the inputs and of the target."""

    stages: list[StageBytes]
    batch: tuple[int, int]
    how: str

    def predicted(self, timetable: Timetable) -> list[RankMemory]:
        """Each rank's step under a timetable of the same cut."""
        return predict_memory(timetable, self.stages, *self.batch)


@dataclass
class Predictor:
    """Predicts for configs of one model that differ in schedule, recompute, reshard and the like.

    Stages that were measured once are not measured again.
    """

    _known: dict[tuple[Any, ...], MeasuredStages] = field(default_factory=dict)

    def predict(self, config: TrainConfig, timetable: Timetable | None = None) -> Prediction:
        """The memory of each rank of a step. Raises ConfigError or PlanError."""
        parallel = config.parallel
        num_ranks = pipeline_ranks(parallel, parallel.num_processes or 1)
        if timetable is None:
            check_layers(build_model(config.model, config.seed, config.finetune), config.schedule, num_ranks)
            timetable = build_timetable(config.schedule, num_ranks, config.num_microbatches)
        measured = self.measure(config, timetable)
        found = ", ".join(config.not_predicted)
        how = measured.how + (f"; NOT COUNTED: what {found} would change" if found else "")
        return Prediction(timetable, measured.stages, measured.predicted(timetable), how)

    def measure(self, config: TrainConfig, timetable: Timetable) -> MeasuredStages:
        """The bytes of each stage of the timetable's cut."""
        sizes = timetable.num_stages, timetable.num_microbatches, config.microbatch_size
        mesh = config.parallel.shard, config.parallel.tensor, config.parallel.reshard
        key = *sizes, *mesh, config.memory.recompute, config.precision, str(config.optimizer)
        if key not in self._known:
            self._known[key] = _measured(config, timetable)
        return self._known[key]


def predict(config: TrainConfig) -> Prediction:
    """The memory of each rank of a configured run."""
    return Predictor().predict(config)


def _measured(config: TrainConfig, timetable: Timetable) -> MeasuredStages:
    with _tensor_mesh(config.parallel) as mesh:
        run = _Stages(config, timetable, mesh)
        try:
            return MeasuredStages(run.measured(FakeTensorMode()), run.batch_bytes, FAKE)
        except ConfigError:
            raise
        except Exception as error:  # whatever an operator without a fake form raises
            if mesh is not None:
                raise ConfigError(
                    f"the stages can't run on fake tensors ({_first_line(error)}), and parts of layers can't "
                    "run alone: write parallel.tensor=1"
                ) from error
            reason = f"{REAL}, since it can't run on fake tensors: {_first_line(error)}"
            with naming("model"), explained_as_data("the forward failed"):
                return MeasuredStages(run.measured(None), run.batch_bytes, reason)


@contextmanager
def _tensor_mesh(parallel: ParallelConfig) -> Iterator[Any]:
    """A mesh whose tensor dimension has the wanted size, of processes that don't exist; None for size 1."""
    if parallel.tensor == 1:
        yield None
        return
    with fake_world(parallel.tensor):
        yield build_mesh(ParallelConfig(tensor=parallel.tensor), "cpu")


class _Stages:
    """The stages of a run, built and measured one after the other."""

    def __init__(self, config: TrainConfig, timetable: Timetable, mesh: Any) -> None:
        self._config, self._timetable, self._mesh = config, timetable, mesh
        self._precision = PRECISIONS[config.precision]
        self._model = build_model(config.model, config.seed, config.finetune)
        rows = timetable.num_microbatches * config.microbatch_size
        self._data = build_data(config.data, rows, config.seed)
        self._is_sharded = config.parallel.shard > 1
        self.batch_bytes = 0, 0

    def measured(self, fake: FakeTensorMode | None) -> list[StageBytes]:
        """The bytes of each stage; fake: what to run in."""
        inside: AbstractContextManager[Any] = nullcontext() if fake is None else fake
        args, target = self._microbatch(inside)
        if fake is not None:
            args, target = tree_map(lambda value: _faked(fake, value), (args, target))
        found: list[StageBytes] = []
        alike: dict[Any, tuple[StageBytes, tuple[Any, ...]]] = {}
        with inside, torch.random.fork_rng([]):
            for index in range(self._timetable.num_stages):
                stage = self._built(index)
                key = self._likeness(index, stage, args)
                if key not in alike:
                    alike[key] = self._stage_bytes(index, stage, args, target)
                each, args = alike[key]
                found.append(each)
        return found

    def _microbatch(self, inside: AbstractContextManager[Any]) -> tuple[tuple[Any, ...], Any]:
        """The inputs and the target of the first microbatch."""
        last = self._timetable.num_stages - 1
        with inside:
            ends = {0: self._built(0), last: self._built(last)}
        widened = torch.float32 if self._precision.is_mixed else None
        cpu = torch.device("cpu")
        args, target = batch_for(ends, last + 1, self._data.train, 0, cpu, target_dtype=widened)
        self.batch_bytes = _nbytes(args), _nbytes(target)
        num = self._timetable.num_microbatches
        args = tuple(into_microbatches("the input", each, num)[0] for each in args)
        return args, None if target is None else into_microbatches("target", target, num)[0]

    def _built(self, index: int) -> nn.Module:
        with naming("model"):
            stage: nn.Module = self._model.build_stage(index, self._timetable.num_stages)
        _cast(stage, self._precision.compute if self._is_sharded else self._precision.stored)
        split_stages(self._model, {index: stage}, self._mesh)
        return stage

    def _likeness(self, index: int, stage: nn.Module, args: tuple[Any, ...]) -> Any:
        """Stages with equal keys do the same work on tensors of the same shapes."""
        last = self._timetable.num_stages - 1
        tensors = [(name, each.dtype, each.shape, each.requires_grad) for name, each in _named_tensors(stage)]
        modules = [(type(each), sorted(_plain_attributes(each))) for each in stage.modules()]
        return str((index == 0, index == last, layout_of(args), tensors, modules))

    def _stage_bytes(
        self, index: int, stage: nn.Module, args: tuple[Any, ...], target: Any
    ) -> tuple[StageBytes, tuple[Any, ...]]:
        config, precision = self._config, self._precision
        is_last = index == self._timetable.num_stages - 1
        masters = None
        if precision.is_mixed and not self._is_sharded:
            masters = MasterWeights(stage.parameters(), precision.compute)
        largest = max((_bytes(each.parameters()) for each in blocks_of(stage)), default=0)
        recompute_stages({index: stage}, config.memory.recompute)
        loss_fn = precision.widened(self._model.loss) if is_last else None
        with LiveTensors() as live:
            memory = microbatch_memory(
                index, stage, args, live, is_last=is_last, loss_fn=loss_fn, target=target
            )
            states, update = _optimizer_bytes(live, _named(stage, masters), config)
        found = StageBytes(
            weights=_bytes([*stage.parameters(), *stage.buffers()]),
            gradients=_bytes(_gradients_of(stage)),
            optimizer=states + (0 if masters is None else _bytes(masters.parameters())),
            keeps_gradients=masters is not None,
            update=update,
            **_of_messages(memory),
        )
        if self._is_sharded:
            found = self._in_shards(found, stage, states, largest)
        return found, memory.outputs

    def _in_shards(self, whole: StageBytes, stage: nn.Module, states: int, largest: int) -> StageBytes:
        """FSDP2: shards and gradients in the stored dtype, gathered weights in the computed one."""
        parallel = self._config.parallel
        stored, computed = self._precision.stored.itemsize, self._precision.compute.itemsize
        parameters = list(dict.fromkeys(stage.parameters()))
        shards = [_shard_numel(each, parallel.shard) for each in parameters]
        trained = sum(n for n, each in zip(shards, parameters, strict=True) if each.requires_grad)
        full = sum(each.numel() for each in parameters if each.requires_grad)
        share = trained * stored / max(1, full * computed)  # of what was measured for whole weights
        found = sharded(
            whole,
            weights=sum(shards) * stored + _bytes(stage.buffers()),
            gradients=trained * stored,
            optimizer=states * share,
            gathered=0 if parallel.reshard == "microbatch" else _bytes(parameters),
            block=largest,
        )
        return replace(found, gradients=full * stored, update=whole.update * share)


def _optimizer_bytes(live: LiveTensors, parameters: Any, config: TrainConfig) -> tuple[int, int]:
    """(bytes of the optimizer's states, bytes that a step needs above them)."""
    optimizer = build_optimizer(parameters, config.optimizer)
    before = live.now
    optimizer.step()
    states = live.mark() - before
    optimizer.step()
    return states, live.highest - live.now


def _named(stage: nn.Module, masters: MasterWeights | None) -> list[Named]:
    """What the optimizer gets of a stage."""
    pairs = stage.named_parameters()
    return [Named((name,), each if masters is None else masters.of(each)) for name, each in pairs]


def _of_messages(memory: MicrobatchMemory) -> dict[str, Any]:
    return {name: value for name, value in memory._asdict().items() if name != "outputs"}


def _cast(stage: nn.Module, dtype: torch.dtype) -> None:
    """What `stage.to(dtype)` does, which swaps fake parameters, and that fails."""
    for module in stage.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _faked(fake: FakeTensorMode, value: Any) -> Any:
    return fake.from_tensor(value) if isinstance(value, Tensor) else value


def _nbytes(tree: Any) -> int:
    """The bytes of the values of all tensors, which may be views of larger ones."""
    return sum(each.nbytes for each in tree_leaves(tree) if isinstance(each, Tensor))


def _bytes(tensors: Any) -> int:
    """The bytes of the tensors' memory on this rank, each once."""
    found = {storage._cdata: storage.nbytes() for each in tensors for storage in storages_of(each)}
    return sum(found.values())


def _gradients_of(stage: nn.Module) -> list[Tensor]:
    """Each parameter's main_grad, or else its `.grad`."""
    given = (getattr(each, "main_grad", None) for each in stage.parameters())
    pairs = zip(stage.parameters(), given, strict=True)
    found = (each.grad if main is None else main for each, main in pairs)
    return [each for each in found if each is not None]


def _shard_numel(parameter: Tensor, shards: int) -> int:
    """Entries of the largest shard: FSDP2 cuts dim 0, and pads."""
    if not parameter.dim():
        return 1
    return -(-len(parameter) // shards) * (parameter.numel() // max(1, len(parameter)))


def _named_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters()
    yield from stage.named_buffers()


def _plain_attributes(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str | tuple) and name != "training":
            yield f"{name}={value}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
