"""--layers: which layers of a model belong on which stage."""

from __future__ import annotations

import argparse

from zbpp.commands.plan.arguments import Inputs
from zbpp.models.flops import head_in_layers
from zbpp.planning import measured_layers
from zbpp.render import render_cuts
from zbpp.schedule import PlanError


def cuts(options: argparse.Namespace) -> str:
    """For each placement the cuts and their loads, from measured costs or from those that are given."""
    if options.costs:
        inputs = Inputs.read(options)
        layers, first, last = measured_layers(inputs.costs, inputs.about, len(options.layers))
        table = render_cuts(layers, options.ranks, first=first, last=last)
        return "\n\n".join([*inputs.notes, table])
    head = _estimated_head(options) if options.head is None else options.head
    return render_cuts(options.layers, options.ranks, first=options.embedding, last=head)


def _estimated_head(options: argparse.Namespace) -> float:
    """The head's cost in the unit of the layers; 0 if no sizes are given."""
    sizes = {name: getattr(options, name) for name in ("hidden", "vocab", "sequence")}
    missing = [f"--{name}" for name, size in sizes.items() if size is None]
    if len(missing) == len(sizes):
        return 0.0
    if missing:
        raise PlanError(f"the head's cost depends on hidden, vocab and sequence: add {', '.join(missing)}")
    mean: float = sum(options.layers) / len(options.layers)
    return mean * head_in_layers(
        layer_parameters=options.layer_parameters or 12 * options.hidden**2,
        hidden_size=options.hidden,
        vocab_size=options.vocab,
        sequence_length=options.sequence,
    )
