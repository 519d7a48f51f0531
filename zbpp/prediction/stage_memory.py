"""Measures the bytes of each stage of a configured run: on fake tensors where that works, else on the CPU.

Each stage is built, runs F, B and W of two microbatches, and makes two optimizer steps; the second microbatch
and the second optimizer step are measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.autograd.storages import bytes_of
from zbpp.config import ConfigError, ParallelConfig, TrainConfig, naming
from zbpp.data.token_batches import TokenBatches, longest_microbatch
from zbpp.features.context.context import as_if_divided
from zbpp.features.context.sequence_parts import sequence_part
from zbpp.features.experts.experts import as_if_spread, no_experts
from zbpp.features.fewer_bytes.codes import coded
from zbpp.features.gradient_release.restricted_update import parameters_of, update
from zbpp.features.weight_offload.weight_buffers import Piece
from zbpp.job.world import fake_world
from zbpp.measure.fake_tensors import FakeTensors
from zbpp.measure.live_tensors import LiveTensors
from zbpp.measure.microbatch_memory import (
    MicrobatchMemory,
    bytes_that_leave,
    gradient_for,
    microbatch_memory,
)
from zbpp.measure.products import Products, products
from zbpp.prediction.measured_stages import MeasuredStages, WeightBytes
from zbpp.prediction.programs import encoded_boundaries
from zbpp.run.data import batched_by_tokens, build_data
from zbpp.run.model import build_model, explained_as_data, keeps_documents_apart
from zbpp.run.optimizer import build_optimizer
from zbpp.run.stages import build_mesh, recompute_stages
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.runtime.layout import layout_of
from zbpp.runtime.processes.dtensors import is_spread, local_of
from zbpp.runtime.processes.tensor_parallel import parallelize
from zbpp.schedule import Costs, Timetable
from zbpp.schedule.interpret.stage_bytes import StageBytes, sharded
from zbpp.stage_api import blocks_of
from zbpp.training.batches import batch_for, part_for
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.parameter_groups import Named
from zbpp.training.optim.precision import PRECISIONS, give_dtypes, kept_in_float32
from zbpp.training.optim.rollback import changes_gradients

FAKE = "on fake tensors: no memory was needed"
REAL = "by one microbatch on the CPU"
LONGEST_OF = 200  # batches of so many tokens: all microbatches count as the longest of these

_REAL_ONLY = (nn.RNNBase,)  # their operators keep memory that fake tensors don't show


class _NotOnFake(Exception):
    """A stage has a module that fake tensors would measure wrong."""


class Known:
    """Stages that were measured before. Their outputs are the next stages' inputs, so they share one mode."""

    def __init__(self) -> None:
        self.stages: dict[Any, MeasuredStage] = {}
        self.fake = FakeTensors()


def measure_stages(
    config: TrainConfig,
    timetable: Timetable,
    slice_bounds: Sequence[int] = (),
    known: Known | None = None,
) -> MeasuredStages:
    """The bytes of each stage of the timetable's cut. slice_bounds: as in Pipeline.

    known: what was measured before, of other configs, too; the stages of this run are added.

    With memory.recompute all stages recompute, which changes what an action holds. Raises ConfigError for
    stages that can't run.
    """
    with _inner_mesh(config.parallel) as mesh:
        known = Known() if known is None else known
        run = _Stages(config, timetable, mesh, slice_bounds, known.stages)
        try:
            return MeasuredStages(*run.measured(known.fake), run.batch_bytes, FAKE)
        except ConfigError:
            raise
        except Exception as error:  # whatever an operator without a fake form raises
            if config.parallel.tensor > 1:
                raise ConfigError(
                    f"the stages can't run on fake tensors ({_first_line(error)}), and parts of layers can't "
                    "run alone: write parallel.tensor=1"
                ) from error
            why = str(error) if isinstance(error, _NotOnFake) else _first_line(error)
            run.check_memory(why)
            reason = f"{REAL}, since it can't run on fake tensors: {why}"
            with naming("model"), explained_as_data("the forward failed"):
                return MeasuredStages(*run.measured(None), run.batch_bytes, reason)


def computed_costs(config: TrainConfig, timetable: Timetable) -> tuple[int, Costs]:
    """(the tokens of a sequence, costs of each stage for a whole sequence) by the stages' products.

    Times are in floating-point operations. Attention is causal: half of its products are needed. Raises
    ConfigError for data whose rows are no sequences.
    """
    with _inner_mesh(config.parallel) as mesh:
        run = _Stages(config, timetable, mesh)
        try:
            found = run.products(FakeTensors())
        except ConfigError:
            raise
        except Exception:  # as in measure_stages
            with naming("model"), explained_as_data("the forward failed"):
                found = run.products(None)
    f, b, w, attention = zip(*found, strict=True)
    linear = Costs(
        f=[whole - each for whole, each in zip(f, attention, strict=True)],
        b=[whole - 2 * each for whole, each in zip(b, attention, strict=True)],
        w=[*w],
        quadratic=Costs(f=[each / 2 for each in attention], b=[*attention], w=0.0),
    )
    return run.sequence_length, linear


@contextmanager
def _inner_mesh(parallel: ParallelConfig) -> Iterator[Any]:
    """A mesh with the config's tensor or expert dimension, over processes that don't exist; None without."""
    degrees = ParallelConfig(tensor=parallel.tensor, expert=parallel.expert, replicate=parallel.expert)
    if degrees.tensor * degrees.expert == 1:
        yield None
        return
    with fake_world(degrees.tensor * degrees.expert):
        yield build_mesh(degrees, "cpu")


MeasuredStage = tuple[StageBytes, WeightBytes, Products, list[tuple[Any, ...]]]
"""The last entry: the outputs of F for each slice of the microbatch."""


def _bytes_on_way(outputs: tuple[Any, ...], form: Any) -> tuple[int, int]:
    """The bytes of a stage's outputs in codes, and those of their gradients."""
    tensors = [each if isinstance(each, Tensor) else None for each in outputs]
    given = [each and gradient_for(each, torch.device("cpu")) for each in layout_of(tuple(outputs))]
    gradients = [None if each is None else each.requires_grad_() for each in given]
    x, g = (
        bytes_of(each for each in coded(tuple(message), form) if each is not None)
        for message in (tensors, gradients)
    )
    return x, g


def _with_codes(
    stage: StageBytes, x: Sequence[tuple[int, int]] | None, g: Sequence[tuple[int, int]] | None
) -> StageBytes:
    """The stage with the bytes in codes of what it receives, of each slice. None: no codes.

    x: of the outputs of the stage before, and of their gradients; g: of its own.
    """
    units = stage.slices or (stage,)
    xs = [None] * len(units) if x is None else [size for size, _ in x]
    gs = [None] * len(units) if g is None else [size for _, size in g]
    if not stage.slices:
        return replace(stage, x_on_way=xs[0], g_on_way=gs[0])
    sizes = zip(units, xs, gs, strict=True)
    return replace(stage, slices=tuple(replace(each, x_on_way=x, g_on_way=g) for each, x, g in sizes))


class _Stages:
    """The stages of a run, built and measured one after the other."""

    def __init__(
        self,
        config: TrainConfig,
        timetable: Timetable,
        mesh: Any,
        slice_bounds: Sequence[int] = (),
        known: dict[Any, MeasuredStage] | None = None,
    ) -> None:
        self._known = {} if known is None else known
        self._config, self._timetable, self._mesh = config, timetable, mesh
        self._slice_bounds = slice_bounds
        self._precision = PRECISIONS[config.precision]
        self._model = build_model(config.model, config.seed, config.finetune)
        rows = timetable.num_microbatches * config.microbatch_size
        self._data = build_data(config.data, rows, config.seed)
        if config.batching.is_tokens:
            keeps_apart = keeps_documents_apart(self._model, timetable.num_stages)
            self._data = batched_by_tokens(self._data, config.batching, keeps_apart=keeps_apart)
        self._is_sharded = config.parallel.shard > 1
        self._encoded = encoded_boundaries(config, timetable.num_stages)
        self.batch_bytes, self.sequence_length = (0, 0), 0
        self._has_experts = False
        self._largest = 0  # bytes of the parameters of a stage

    def measured(
        self, fake: FakeTensors | None
    ) -> tuple[list[StageBytes], list[WeightBytes], list[Products]]:
        """The bytes and products of each stage. fake: the mode to run the stages in; None: on the CPU."""
        inside: AbstractContextManager[Any] = nullcontext() if fake is None else fake
        args, target = self._microbatch(inside)
        if fake is not None:
            args, target = tree_map(fake.faked, (args, target))
        found: list[tuple[StageBytes, WeightBytes, Products]] = []
        on_way: dict[int, list[tuple[int, int]]] = {}
        with inside, torch.random.fork_rng([]):
            for index in range(self._timetable.num_stages):
                stage = self._built(index)
                if fake is not None:
                    _check_modules(stage)
                key = fake is None, self._likeness(index, stage, args, target)
                if key not in self._known:
                    self._known[key] = self._stage_bytes(index, stage, args, target)
                each, weights, work, args = self._known[key]
                found.append((each, weights, work))
                if index in self._encoded:
                    on_way[index] = [_bytes_on_way(each, self._config.parallel.messages) for each in args]
        if self._config.parallel.expert > 1 and not self._has_experts:
            raise ConfigError(f"parallel: {no_experts(self._config.parallel.expert)}")
        stages = [_with_codes(each, on_way.get(i - 1), on_way.get(i)) for i, (each, *_) in enumerate(found)]
        return stages, [each for _, each, _ in found], [each for _, _, each in found]

    def products(self, fake: FakeTensors | None) -> list[Products]:
        """The products of each stage, and `sequence_length`. fake: as in `measured`."""
        inside: AbstractContextManager[Any] = nullcontext() if fake is None else fake
        args, target = self._microbatch(inside)
        first = next((each for each in args[0] if isinstance(each, Tensor)), None)
        if first is None or first.dim() < 2:
            raise ConfigError("schedule.slices cuts dimension 1 of the inputs, and the data's have none")
        self.sequence_length = first.shape[1] * self._config.parallel.context
        if fake is not None:
            args, target = tree_map(fake.faked, (args, target))
        found, last = list[Products](), self._timetable.num_stages - 1
        with inside, torch.random.fork_rng([]):
            for index in range(last + 1):
                stage = self._built(index)
                loss_fn = self._precision.widened(self._model.loss) if index == last else None
                run: dict[str, Any] = {"is_last": index == last, "loss_fn": loss_fn, "target": target}
                each, args = products(index, stage, args, **run)
                found.append(each)
        return found

    def _microbatch(self, inside: AbstractContextManager[Any]) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """The inputs and the target of the first microbatch, or of a longest one: of each of its slices."""
        last, num = self._timetable.num_stages - 1, self._timetable.num_microbatches
        with inside:
            ends = {0: self._built(0), last: self._built(last)}
        widened = torch.float32 if self._precision.is_mixed else None
        cpu, train = torch.device("cpu"), self._data.train
        if isinstance(train, TokenBatches):
            parallel = self._config.parallel
            parts = parallel.replicate * parallel.shard
            group, _ = longest_microbatch(train, num * parts, LONGEST_OF)
            args, target = part_for(ends, last + 1, train.microbatch(group), cpu, target_dtype=widened)
            self.batch_bytes = num * _nbytes(args), num * _nbytes(target)
            return [args], [target]
        args, target = batch_for(ends, last + 1, train, 0, cpu, target_dtype=widened)
        self.batch_bytes = _nbytes(args), _nbytes(target)
        num_slices = self._timetable.num_slices
        if (context := self._config.parallel.context) > 1:  # one process's part
            args, target = sequence_part((args, target), args[0].shape[1], 0, context, self._slice_bounds)
        bounds = [each // context for each in self._slice_bounds]

        def first(name: str, value: Any) -> list[Any]:
            return into_microbatches(name, value, num, bounds)[:num_slices]

        slices = [*zip(*[first("the input", each) for each in args], strict=True)]
        return slices, [None] * num_slices if target is None else first("target", target)

    def _built(self, index: int) -> nn.Module:
        with naming("model"):
            stage: nn.Module = self._model.build_stage(index, self._timetable.num_stages)
        self._largest = max(self._largest, bytes_of(stage.parameters()))
        give_dtypes(stage, self._precision, as_computed=self._is_sharded)
        with naming("model"):
            parallelize(self._model, {index: stage}, self._mesh)
            self._has_experts |= as_if_spread(stage, self._mesh)
            if self._config.parallel.context > 1:
                as_if_divided(stage, self._config.parallel.context)
        return stage

    def check_memory(self, why: str) -> None:
        """Raise ConfigError if a stage that was built on fake tensors would not fit on this machine.

        With gradients and an optimizer's two states it takes four times its parameters. why: it runs here.
        """
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 4 * self._largest > free:
            raise ConfigError(
                f"the stages can't run on fake tensors ({why}), and on this CPU a stage takes "
                f"{4 * self._largest / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free: write fewer or "
                "narrower layers, or more ranks"
            )

    def _wraps_w(self) -> bool:
        """Whether a feature wraps what runs W's."""
        config = self._config
        return config.memory.offload_weights or (self._is_sharded and config.parallel.reshard == "microbatch")

    def _likeness(self, index: int, stage: nn.Module, args: list[tuple[Any, ...]], target: list[Any]) -> Any:
        """Stages with equal keys do the same work on tensors of the same shapes."""
        config, last = self._config, self._timetable.num_stages - 1
        tensors = [  # without the layers' numbers
            (re.sub(r"\d+", "", name), each.dtype, each.shape, each.requires_grad)
            for name, each in _named_tensors(stage)
        ]
        modules = [(type(each), sorted(_plain_attributes(each))) for each in stage.modules()]
        targets = [(each.dtype, each.shape) for each in tree_leaves(target) if isinstance(each, Tensor)]
        of_last = (targets, config.memory.head_at_once) if index == last else ()
        model = {name: value for name, value in config.model.items() if name != "layers_per_stage"}
        run = model, config.precision, config.parallel, config.memory.recompute, self._slice_bounds
        optimizer = replace(config.optimizer, validation="before", clip_norm=None)
        is_released = config.memory.gradient_release != "off"
        of_run = (*run, optimizer, is_released, self._wraps_w())
        return str((of_run, of_last, index == 0, [*map(layout_of, args)], tensors, modules))

    def _stage_bytes(
        self, index: int, stage: nn.Module, args: list[tuple[Any, ...]], target: list[Any]
    ) -> MeasuredStage:
        config, precision = self._config, self._precision
        is_last = index == self._timetable.num_stages - 1
        masters = None
        if precision.is_mixed and not self._is_sharded:
            masters = MasterWeights(
                stage.parameters(), precision.compute, keep=kept_in_float32(stage, precision)
            )
        blocks = [[*each.parameters()] for each in [*blocks_of(stage)] or [stage]]
        largest = max(map(bytes_of, blocks), default=0)
        recompute_stages({index: stage}, config.memory.recompute)
        loss_fn = precision.widened(self._model.loss) if is_last else None
        is_released = config.memory.gradient_release != "off"
        optimizer = build_optimizer(_named(stage, masters), config.optimizer, is_released)
        run: dict[str, Any] = {"is_last": is_last, "loss_fn": loss_fn}
        sliced: dict[str, Any] = {"target": target, "slice_bounds": self._slice_bounds}
        with LiveTensors() as live:
            memory = microbatch_memory(
                index,
                stage,
                args,
                live,
                head_at_once=config.memory.head_at_once,
                wraps_w=self._wraps_w(),
                **run,
                **sliced,
            )
            states, update = _optimizer_bytes(live, optimizer)
        parameters = bytes_of(stage.parameters())
        trained = 0 if masters else bytes_of(each for each in stage.parameters() if each.requires_grad)
        found = StageBytes(
            weights=bytes_of([*stage.parameters(), *stage.buffers()]),
            gradients=bytes_of(_gradients_of(stage)),
            optimizer=states + (0 if masters is None else bytes_of(masters.parameters())),
            keeps_gradients=masters is not None,
            update=update,
            **self._of_microbatch(memory),
        )
        if not self._slice_bounds:  # activations in slices don't leave
            leaves = bytes_that_leave(index, stage, args[0], target=target[0], **run)
            found = replace(found, leaves=leaves)
        sizes = [Piece(each).nbytes for each in blocks if each]
        weights = WeightBytes(parameters, max(sizes, default=0), trained, changes_gradients(optimizer))
        if self._is_sharded:
            found = self._in_shards(found, stage, states, largest)
            weights = weights._replace(trained=trained * found.weights / max(1, parameters))
        return found, weights, products(index, stage, args, **run, **sliced)[0], memory.outputs

    def _of_microbatch(self, memory: MicrobatchMemory) -> dict[str, Any]:
        """The fields of StageBytes that belong to a microbatch, or to its slices."""
        if not self._slice_bounds:
            return asdict(memory.bytes[0])
        shared = {"past": memory.past, "past_gradients": memory.past_gradients}
        return {"slices": tuple(memory.bytes), **shared}

    def _in_shards(self, whole: StageBytes, stage: nn.Module, states: int, largest: int) -> StageBytes:
        """The stage under FSDP2: shards and gradients in the stored dtype, gathered weights as computed.

        stage: the module with whole weights, of which `whole` are the bytes.
        """
        parallel = self._config.parallel
        stored, computed = self._precision.stored.itemsize, self._precision.compute.itemsize
        parameters = list(dict.fromkeys(stage.parameters()))
        shards = [_shard_numel(each, parallel) for each in parameters]
        trained = sum(n for n, each in zip(shards, parameters, strict=True) if each.requires_grad)
        full = sum(local_of(each).numel() for each in parameters if each.requires_grad)
        share = trained * stored / max(1, full * computed)  # of the bytes measured with whole weights
        found = sharded(
            whole,
            weights=sum(shards) * stored + bytes_of(stage.buffers()),
            gradients=trained * stored,
            optimizer=states * share,
            gathered=0 if parallel.reshard == "microbatch" else bytes_of(parameters),
            block=largest,
        )
        return replace(found, gradients=full * stored, update=whole.update * share)


def _named(stage: nn.Module, masters: MasterWeights | None) -> list[Named]:
    """The named parameters, or masters, that the optimizer gets for a stage."""
    pairs = stage.named_parameters()
    return [Named((name,), each if masters is None else masters.of(each)) for name, each in pairs]


def _check_modules(stage: nn.Module) -> None:
    """Raise _NotOnFake for a module whose memory fake tensors don't show."""
    for module in stage.modules():
        if isinstance(module, _REAL_ONLY):
            raise _NotOnFake(f"{type(module).__name__} keeps memory that they don't show")


def _optimizer_bytes(live: LiveTensors, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """(bytes of the optimizer's states, temporary bytes of a step)."""
    trained = [each for each in parameters_of(optimizer) if each.grad is not None]
    update(optimizer, trained)
    start = live.mark()
    update(optimizer, trained)
    states = (value for state in optimizer.state.values() for value in state.values())
    return bytes_of(each for each in states if isinstance(each, Tensor)), live.highest - start


def _nbytes(tree: Any) -> int:
    """The bytes of all tensors' elements; a tensor may be a view of a larger one."""
    return sum(each.nbytes for each in tree_leaves(tree) if isinstance(each, Tensor))


def _gradients_of(stage: nn.Module) -> list[Tensor]:
    """Each parameter's main_grad, or else its `.grad`."""
    given = (getattr(each, "main_grad", None) for each in stage.parameters())
    pairs = zip(stage.parameters(), given, strict=True)
    found = (each.grad if main is None else main for each, main in pairs)
    return [each for each in found if each is not None]


def _shard_numel(parameter: Tensor, parallel: ParallelConfig) -> int:
    """The number of elements of the largest shard: FSDP2 cuts dimension 0, and pads."""
    if not parameter.dim():
        return 1
    shards = parallel.num_shards
    if is_spread(parameter):  # experts are cut evenly
        return local_of(parameter).numel() * parallel.expert // (parallel.replicate * shards)
    return -(-len(parameter) // shards) * (parameter.numel() // max(1, len(parameter)))


def _named_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters()
    yield from stage.named_buffers()


_NO_DIFFERENCE = ("training", "layer_idx", "_index")  # the number of a layer, or of a stage


def _plain_attributes(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str | tuple) and name not in _NO_DIFFERENCE:
            yield f"{name}={value}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
