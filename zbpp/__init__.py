"""zbpp: zero-bubble pipeline parallelism for PyTorch.

    schedule     what a plan is: timetables, costs, simulation, programs; the schedules of the field
    planning     which plan to run: by name or by search, with bounds
    autograd     the split backward: B and W
    runtime      one rank's life inside one step: Pipeline
    features     what a user can switch on beside it, a folder for each: replicas, offload, CUDA graphs ...
    observers    what sees each step and changes nothing: recorders, checks
    measure      what stages take: costs, and bytes of a microbatch
    cutting      an existing module cut into stages
    models       models that are built one stage at a time
    render       timelines and answers of the planner as text, pictures and pages
    data         batches: text, prepared tokens, a user's own Dataset
    checkpoints  saving and loading, whatever the cut
    training     everything around the step: optimizer, trainer
    config       the config: its typed tree, and composing it
    run          from a config to a finished run, and to an exported model
    job          how a process joins its job, and what all ranks agree on
    prediction   what each rank will hold, and what each switch would save
    cluster      scale on paper: a run on a cluster, from sizes and datasheets
    benchmark    measuring costs; timing schedules and runtimes
    parity_check does a trainer compute what one process computes? (parity.py: the entry for torchrun)
    commands     the command line, a file for each command

    transformers      transformers.Trainer, and TRL's SFTTrainer, in a pipeline
    torch_pipelining  torch's Schedule classes on zbpp's Pipeline; torchtitan.py uses them

    launch       starts a job's ranks on this machine
    partition    which layers go to which stage
    stage_api    the contract between zbpp and a user's model
    streams      the streams of a GPU

The public names are loaded when they are first used: `import zbpp` imports no torch. It sets two variables of
the environment, unless they are set, which CUDA reads when it is used first: see job/cuda_settings.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbpp.job.cuda_settings import set_environment as _set_environment

if TYPE_CHECKING:
    from zbpp.autograd import (
        WeightGrads,
        auxiliary_loss,
        auxiliary_losses,
        backward_input,
        checkpoint,
        linear_cross_entropy,
    )
    from zbpp.checkpoints import load, save
    from zbpp.cutting import split_sequential, trace_stages
    from zbpp.features.activation_offload.activation_offload import ActivationOffload
    from zbpp.features.experts.overlap_exchange import OverlapExchange
    from zbpp.features.fewer_bytes.fewer_bytes import FewerBytes
    from zbpp.features.gradient_release.gradient_release import GradientRelease
    from zbpp.features.graphs import CudaGraphs
    from zbpp.features.head_at_once.head_at_once import HeadAtOnce
    from zbpp.features.messages_ahead.messages_ahead import MessagesAhead
    from zbpp.features.reductions.norm import clip_grad_norm_
    from zbpp.observers.flight_recorder import FlightRecorder
    from zbpp.observers.non_finite import find_non_finite
    from zbpp.observers.recorder import Recorder
    from zbpp.observers.replicas import check_replicas
    from zbpp.parity_check import parity
    from zbpp.partition import split_layers
    from zbpp.planning import SCHEDULES, order_microbatches, plan
    from zbpp.runtime import Extra, Feature, Observer, Pipeline, make_mesh, per_microbatch, replicate
    from zbpp.schedule import Costs, Links, PlanError, Timeline, Timetable, lower, simulate
    from zbpp.training.optim.master_weights import MasterWeights
    from zbpp.training.optim.post_validation import PostValidation
    from zbpp.training.optim.precision import LossScale

__version__ = "0.1.0"

_HOME = {
    "ActivationOffload": "zbpp.features.activation_offload.activation_offload",
    "SCHEDULES": "zbpp.planning",
    "Costs": "zbpp.schedule",
    "Links": "zbpp.schedule",
    "CudaGraphs": "zbpp.features.graphs",
    "Extra": "zbpp.runtime",
    "Feature": "zbpp.runtime",
    "FewerBytes": "zbpp.features.fewer_bytes.fewer_bytes",
    "FlightRecorder": "zbpp.observers.flight_recorder",
    "GradientRelease": "zbpp.features.gradient_release.gradient_release",
    "HeadAtOnce": "zbpp.features.head_at_once.head_at_once",
    "LossScale": "zbpp.training.optim.precision",
    "MasterWeights": "zbpp.training.optim.master_weights",
    "MessagesAhead": "zbpp.features.messages_ahead.messages_ahead",
    "Observer": "zbpp.runtime",
    "OverlapExchange": "zbpp.features.experts.overlap_exchange",
    "Pipeline": "zbpp.runtime",
    "PlanError": "zbpp.schedule",
    "PostValidation": "zbpp.training.optim.post_validation",
    "Timeline": "zbpp.schedule",
    "Timetable": "zbpp.schedule",
    "Recorder": "zbpp.observers.recorder",
    "WeightGrads": "zbpp.autograd",
    "auxiliary_loss": "zbpp.autograd",
    "auxiliary_losses": "zbpp.autograd",
    "backward_input": "zbpp.autograd",
    "check_replicas": "zbpp.observers.replicas",
    "checkpoint": "zbpp.autograd",
    "clip_grad_norm_": "zbpp.features.reductions.norm",
    "find_non_finite": "zbpp.observers.non_finite",
    "linear_cross_entropy": "zbpp.autograd",
    "load": "zbpp.checkpoints",
    "lower": "zbpp.schedule",
    "make_mesh": "zbpp.runtime",
    "order_microbatches": "zbpp.planning",
    "parity": "zbpp.parity_check",
    "per_microbatch": "zbpp.runtime",
    "plan": "zbpp.planning",
    "replicate": "zbpp.runtime",
    "save": "zbpp.checkpoints",
    "simulate": "zbpp.schedule",
    "split_layers": "zbpp.partition",
    "split_sequential": "zbpp.cutting",
    "trace_stages": "zbpp.cutting",
}

__all__ = [
    "SCHEDULES",
    "ActivationOffload",
    "Costs",
    "CudaGraphs",
    "Extra",
    "Feature",
    "FewerBytes",
    "FlightRecorder",
    "GradientRelease",
    "HeadAtOnce",
    "Links",
    "LossScale",
    "MasterWeights",
    "MessagesAhead",
    "Observer",
    "OverlapExchange",
    "Pipeline",
    "PlanError",
    "PostValidation",
    "Recorder",
    "Timeline",
    "Timetable",
    "WeightGrads",
    "auxiliary_loss",
    "auxiliary_losses",
    "backward_input",
    "check_replicas",
    "checkpoint",
    "clip_grad_norm_",
    "find_non_finite",
    "linear_cross_entropy",
    "load",
    "lower",
    "make_mesh",
    "order_microbatches",
    "parity",
    "per_microbatch",
    "plan",
    "replicate",
    "save",
    "simulate",
    "split_layers",
    "split_sequential",
    "trace_stages",
]

_set_environment()


# Packages that the docs name without an import of their own: `zbpp.stage_api.mean_over_tokens`.
_PACKAGES = ("autograd", "stage_api", "torch_pipelining")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"zbpp.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'zbpp' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
