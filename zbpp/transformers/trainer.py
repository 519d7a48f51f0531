"""in_pipeline: a subclass of a Trainer class that trains in a pipeline over all processes of the job.

accelerate    a pipeline is one process, without DDP; rank 0 logs and saves      create_accelerator...
data          each pipeline's share of the batches, see replicas.py              get_..._dataloader
optimizer     over the whole model, as ever; then the model is cut               create_optimizer
wrap          the wrapped model is the rank's stages                             _wrap_model
microbatches  the batches of a step are kept until its last one comes            get_batch_samples
step          Pipeline.step of all of them; the loss goes to all ranks           training_step
clipping      one norm over all ranks                                            accelerator's clipping
bubble        of a step that is logged, measured; beside its loss                log
evaluation    Pipeline.evaluate of a batch                                       prediction_step
saving        see checkpoints.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.features.reductions.norm import clip_grad_norm_
from zbpp.job.joining import rank_and_size
from zbpp.observers.recorder import Recorder
from zbpp.planning import plan
from zbpp.runtime import Pipeline, per_microbatch
from zbpp.schedule import Timetable
from zbpp.transformers.batches import arguments, check_columns, checksum, share_of_targets, split, targets
from zbpp.transformers.checkpoints import Checkpoints, raw_optimizer
from zbpp.transformers.chosen_cut import chosen_cut, options_of
from zbpp.transformers.cut_model import CutModel, base_of
from zbpp.transformers.folder import options_of_folder, read_own
from zbpp.transformers.losses import OwnLoss, has_own_loss
from zbpp.transformers.names import check_names, check_names_of_trl
from zbpp.transformers.refusals import (
    check_arguments,
    check_folder,
    check_layers,
    check_made_model,
    check_model,
    check_options,
    check_precision,
    check_replicas,
    check_slices,
    check_trainer,
)
from zbpp.transformers.replicas import Replicas
from zbpp.transformers.report import held, report, report_measured
from zbpp.transformers.trl import OfTrl, is_of_dpo

_WARM = 2  # the first step pays for loading and allocating

Schedule = str | Callable[[int, int], Timetable]


def in_pipeline(
    trainer: type[Any],
    schedule: Schedule = "zb_h1",
    *,
    replicas: int = 1,
    layers_per_stage: Sequence[int] | str | None = None,
    **options: Any,
) -> type[Any]:
    """A subclass of `trainer`, a transformers.Trainer, that trains in a pipeline over all processes.

    It takes the arguments of `trainer`. model: a causal language model of transformers, or a PeftModel of
    one, on the CPU and the same on all ranks; or a folder with weights, of which each rank reads its own
    tensors. The microbatches of a step are the gradient_accumulation_steps batches of the TrainingArguments.

    schedule: one of zbpp.SCHEDULES, or a function of (number of ranks, number of microbatches) that returns a
    Timetable. replicas: how many pipelines there are, each of (number of processes) / replicas ranks; each
    trains on its share of the batches, as a data-parallel process of the Trainer does. layers_per_stage: how
    many layers each stage has; None: even; "auto": chosen for the speeds of the ranks, which each time a
    block, and for the free memory of accelerators. options: of zbpp.Pipeline, such as timeout or extras.
    Raises ValueError for a class that can't train in a pipeline, and for a version of transformers without
    one of the names that are needed (names.py). The subclass raises ValueError, when it is made, for
    arguments that don't go with a pipeline (refusals.py).
    """
    check_names(trainer)
    check_trainer(trainer)
    check_options(options)
    check_layers(layers_per_stage, schedule)
    attributes = {
        "schedule": schedule,
        "num_replicas": replicas,
        "layers_per_stage": layers_per_stage,
        "options": options,
    }
    if callable(schedule):
        attributes["schedule"] = staticmethod(schedule)
    return type(f"{trainer.__name__}InPipeline", (PipelineTrainer, trainer), attributes)


class PipelineTrainer(OfTrl, Checkpoints):
    """What `in_pipeline` puts before a Trainer class."""

    schedule: Schedule = "zb_h1"
    num_replicas: int = 1
    layers_per_stage: Sequence[int] | str | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    _recorder: Recorder | None = None  # of the last step, if it will be logged
    _chosen: Sequence[int] | None = None  # layers_per_stage of "auto"
    _choice = ""  # the same in words
    _num_steps = 0  # that this process has begun

    def __init__(self, model: Any = None, *others: Any, **more: Any) -> None:
        given = next(
            (each for each in (*others, *more.values()) if hasattr(each, "per_device_train_batch_size")), None
        )
        check_replicas(self.num_replicas)
        if given is not None:
            check_arguments(given, self.num_replicas)
        if isinstance(model, str | Path):
            check_folder(given, self.layers_per_stage)
            quantization = more.pop("quantization_config", None)
            model = self._read(str(model), given, quantization, more.get("peft_config"))
        check_model(model, more.get("model_init"))
        super().__init__(model, *others, **more)
        check_arguments(self.args, self.num_replicas)
        check_precision(self.accelerator.mixed_precision)
        check_made_model(self.model)
        check_names_of_trl(self)
        self._own_loss = OwnLoss(self) if has_own_loss(self) else None
        self._operations: dict[Any, int] = {}  # by the shapes of a microbatch

    # ---- Making it

    def _read(self, folder: str, args: Any, quantization_config: Any, peft_config: Any) -> Any:
        rank, world = (each // self.num_replicas for each in rank_and_size())
        timetable = self._timetable(world, 1 if args is None else args.gradient_accumulation_steps)
        options = {**(getattr(args, "model_init_kwargs", None) or {})}
        if quantization_config is not None:
            options["quantization_config"] = quantization_config
        layers = self._layers(args, lambda: options_of_folder(folder, **options), peft_config)
        return read_own(folder, timetable.stages_of(rank), timetable.num_stages, layers, **options)

    def _layers(self, args: Any, options: Callable[[], Any], adapters: Any) -> Sequence[int] | None:
        """How many layers each stage has. Collective if that is to be chosen. See `chosen_cut`."""
        if not isinstance(self.layers_per_stage, str):
            return self.layers_per_stage
        num_ranks = rank_and_size()[1] // self.num_replicas
        if num_ranks > 1 and self._chosen is None:
            self._chosen, self._choice = chosen_cut(
                options(), adapters, args, str(self.schedule), num_ranks, self.num_replicas
            )
        return self._chosen

    def create_accelerator_and_postprocess(self) -> None:
        """Tell accelerate that each pipeline is one data-parallel process, see replicas.py."""
        self._replicas = Replicas(self.num_replicas, self.args.device.type, self._timeout)
        config: Any = self.args.accelerator_config
        config.dispatch_batches = False  # each rank reads a stream by itself
        super().create_accelerator_and_postprocess()
        self._replicas.tell(self.accelerator, self._clip)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The stages are moved when the model is cut."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's own over the whole model, so with the groups of one process; then the cut."""
        if self._groups is not None and self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer()
        raw = raw_optimizer(optimizer)
        cut = self._made_cut()
        try:
            self._groups = [[cut.names[id(each)] for each in group["params"]] for group in raw.param_groups]
        except KeyError:
            raise ValueError(
                "the optimizer has parameters that are not the model's: make it of model.parameters(), or "
                "leave optimizers out"
            ) from None
        own = {id(each) for each in cut.pipeline.parameters()}
        for group in raw.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in own]
        for each in [each for each in raw.state if id(each) not in own]:  # Adagrad begins with states
            del raw.state[each]
        return optimizer

    def _made_cut(self) -> CutModel:
        """The model, cut when this is called first. Collective."""
        if self._cut is None:
            model: Any = self.model
            model.config.use_cache = False
            timetable = self._timetable(self._replicas.num_ranks, self.args.gradient_accumulation_steps)
            check_slices(timetable, self._own_loss)
            if self.neftune_noise_alpha is not None:  # its hook asks the stage's copy of the module
                base_of(model).get_input_embeddings().neftune_noise_alpha = self.neftune_noise_alpha
            options = {"seed": self.args.seed, **self.options}
            adapters = next(iter(getattr(model, "peft_config", {}).values()), None)
            self._cut = CutModel(
                model,
                timetable,
                self._own_loss,
                self.args.device,
                self._replicas,
                self._layers(self.args, lambda: options_of(model), adapters),
                **options,
            )
            self._say_plan(self._cut)
        return self._cut

    def _say_plan(self, cut: CutModel) -> None:
        """Print the cut and the plan, on rank 0. Collective."""
        timetable = cut.pipeline.timetable
        everyone = cut.pipeline.place.gather(held(cut.pipeline))[: timetable.num_ranks]
        name = self.schedule if isinstance(self.schedule, str) else "a schedule of your own"
        planned = partial(self._timetable, timetable.num_ranks)
        text = report(name, timetable, cut.layers, everyone, planned, self.num_replicas, self._choice)
        self._say(text)

    def _say_measured(self, pipeline: Pipeline, recorder: Recorder) -> None:
        """Print the bubble of a step and the memory of the ranks, on rank 0. Collective."""
        everyone = pipeline.place.gather(held(pipeline, raw_optimizer(self.optimizer)))
        timeline = recorder.timeline()
        self._say(report_measured(timeline, everyone[: timeline.timetable.num_ranks]))

    def _say(self, text: str) -> None:
        """Print lines on rank 0, above the Trainer's bars."""
        from tqdm.auto import tqdm

        if self.args.should_log:
            tqdm.write(text)

    def _timetable(self, num_ranks: int, num_microbatches: int) -> Timetable:
        if callable(self.schedule):
            return self.schedule(num_ranks, num_microbatches)
        return plan(self.schedule, num_ranks, num_microbatches)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._made_cut().wrapped

    @property
    def _timeout(self) -> float:
        return float(self.options.get("timeout", 600.0))

    def get_train_dataloader(self) -> Any:
        """The loader of this rank's pipeline, which seeds its workers by the pipeline's number."""
        with self._replicas.as_processes():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicas.as_processes():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicas.as_processes():
            return super().get_test_dataloader(*args, **kwargs)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of this rank, made when it is asked for first. Collective then."""
        return self._made_cut().pipeline

    # ---- Training

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The microbatches of a step, which `training_step` is given one by one."""
        samples, num_items = super().get_batch_samples(*args, **kwargs)
        self._num_waiting = len(samples)
        self._microbatches: list[Any] = []
        return samples, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Zero for all microbatches of a step but the last one, which runs the step of all of them."""
        self._microbatches.append(dict(self._prepare_inputs(inputs)))
        if len(self._microbatches) < self._num_waiting:
            return torch.zeros((), device=self.args.device)
        model.train()
        to_train_mode = getattr(self.optimizer, "train", None)  # of a schedule-free optimizer
        if callable(to_train_mode):
            to_train_mode()
        pipeline = self.pipeline
        pipeline.num_steps = self.state.global_step  # seeds the random numbers of the step
        share = self._share(self._microbatches, num_items_in_batch, self._replicas.sum)
        pipeline.loss_scale = share * self._scale
        args, target = self._arguments(
            self._microbatches, pipeline.timetable.num_microbatches, num_items_in_batch
        )
        with self.accelerator.autocast(), self._recorded(pipeline):
            losses = pipeline.step(*args, target=target)
        return self._replicas.mean(self._told(losses, self._microbatches)) * share

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """The library's count, which goes over the whole model: once for each shape of microbatches."""
        key = tuple((name, each.shape) for name, each in inputs.items() if isinstance(each, Tensor))
        if key not in self._operations:
            self._operations[key] = super().floating_point_ops(inputs)
        return self._operations[key]

    @property
    def _scale(self) -> float:
        """The factor on gradients that float16 needs, equal on all ranks; 1 for another precision."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.args.device)))

    @contextmanager
    def _recorded(self, pipeline: Pipeline) -> Iterator[None]:
        """Measure the step inside if it will be logged, and the second one, which is the first warm one."""
        every = self.state.logging_steps if self.args.logging_strategy == "steps" else 0
        is_logged = bool(every) and (self.state.global_step + 1) % every == 0
        self._num_steps += 1
        if not is_logged and self._num_steps != _WARM:
            yield
            return
        with pipeline.using(Recorder()) as recorder:
            yield
        if self._num_steps == _WARM:
            self._say_measured(pipeline, recorder)
        self._recorder = recorder if is_logged else None

    def _arguments(self, microbatches: list[Any], num_planned: int, num_items: Any) -> tuple[list[Any], Any]:
        """Arguments of stage 0 and the target of the last stage."""
        args = arguments(microbatches, num_planned)
        if self._own_loss is None:
            for each in microbatches:
                check_columns(each)
            return args, targets(microbatches, num_planned)
        self._own_loss.begin_step(num_items, len(microbatches), num_planned)
        pad = [None] * (num_planned - len(microbatches))
        return args, per_microbatch([*microbatches, *pad])

    def _share(self, microbatches: list[Any], num_items: Any, total: Callable[[int], int]) -> float:
        """See `share_of_targets`."""
        return share_of_targets(microbatches, num_items, total) if self._own_loss is None else 1.0

    def _told(self, losses: list[Tensor], batch: list[Any]) -> Tensor:
        """The mean of the losses, which the last stage's rank has, on all ranks of this pipeline.

        Raises RuntimeError, on all ranks, unless all ranks had the same batch.
        """
        loss = torch.stack(losses).double().mean() if losses else torch.zeros((), dtype=torch.float64)
        loss = loss.to(self.args.device)
        everyone = self._made_cut().gather(torch.stack([checksum(batch), loss.view(torch.int64)]))
        if len({int(each[0]) for each in everyone}) > 1:
            raise RuntimeError(
                "the ranks of this pipeline were given different batches: give all ranks the same data, and "
                "seed whatever draws from them alike"
            )
        last = everyone[self.pipeline.timetable.rank_of[-1]]
        return last[1].view(torch.float64).float()

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the norm over all ranks; see accelerate's clip_grad_norm_."""
        if norm_type != 2:
            raise ValueError(f"the gradients of a pipeline are clipped by their 2-norm, not {norm_type}")
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.pipeline, max_norm)

    # ---- Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """preprocess_logits_for_metrics is called before logits are sent to all ranks."""
        self._made_cut()
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = self._preprocess

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch, on every rank."""
        inputs = dict(self._prepare_inputs(inputs))
        labels = inputs.get("labels")
        has_loss = labels is not None or is_of_dpo(inputs)
        counts = labels is not None and self._counts_in_evaluation
        num_items = self._get_num_items_in_batch([inputs], self.args.device) if counts else None
        losses, logits = self._evaluated(
            inputs, num_items, has_loss=has_loss, returns_logits=not prediction_loss_only
        )
        loss = self._told(losses, [inputs]) if has_loss else None
        if loss is not None:
            # The Trainer takes the mean of the replicas' losses.
            loss *= self._share([inputs], num_items, lambda own: own * self.num_replicas)
        if prediction_loss_only:
            return loss, None, None
        if logits is not None and self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return loss, self._made_cut().from_last(logits), labels

    def _evaluated(
        self, inputs: Any, num_items: Any, *, has_loss: bool, returns_logits: bool
    ) -> tuple[list[Tensor], Any]:
        """(losses, logits) of a batch, on the last stage's rank; ([], None) elsewhere."""
        pipeline, own = self.pipeline, self._own_loss
        num_planned, run = pipeline.timetable.num_microbatches, pipeline.evaluate
        target = None
        if own is not None or not has_loss:  # compute_loss is a function of the whole batch
            parts, num_planned, run = [inputs], 1, pipeline.evaluate_as_one
        else:
            parts = split(inputs, num_planned)
        if has_loss:
            target = targets(parts, num_planned) if own is None else per_microbatch(parts)
        if own is not None:
            own.begin_evaluation(num_items)
        args = arguments(parts, num_planned)
        with self.accelerator.autocast():
            found = run(*args, target=target, return_outputs=returns_logits)
        return found if returns_logits else (found, None)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the bubble beside a loss."""
        if "loss" in logs and self._recorder is not None:
            logs["bubble"] = round(self._recorder.timeline().bubble_rate, 4)
            self._recorder = None
        super().log(logs, *args, **kwargs)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Raises ValueError."""
        raise ValueError(
            "hyperparameter_search makes models anew, which a pipeline has no way to: leave it out"
        )
