"""The state of a pipeline: its parameters and their names, its state dict, the number of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zbpp.runtime.parameters import StageParameters
from zbpp.runtime.pipeline_validation import PipelineValidation
from zbpp.seeding import seed_of


class PipelineState(PipelineValidation):
    """The part of Pipeline that gives access to parameters, buffers and the number of steps."""

    stages: Mapping[int, nn.Module]
    seed: int
    _parameters: StageParameters
    _copies: set[int]  # ids of the parameters whose first copy is elsewhere

    @property
    def num_steps(self) -> int:
        """How many steps are done; see Pipeline."""
        return self._engine.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._engine.num_steps = number

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages and of a loss that is a module, each once: for optimizers."""
        return (parameter for _, parameter in self._parameters.named())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """Those of `parameters` that this process counts: over the mesh, each part of each comes once.

        Replicas count each for itself.
        """
        mine = (each for each in self.parameters() if id(each) not in self._copies)
        return filter(self.place.counts, mine)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with the names that they have in the whole model: the stage modules' own.

        Where two stages of the pipeline use one name for different tensors, every name on every rank begins
        with `stages.{index}.`.
        """
        return self._parameters.named()

    def parameter_names(self) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
        """`named_parameters` with all names of each; a tied parameter also has those of its other places."""
        return self._parameters.all_names()

    @property
    def has_prefixed_names(self) -> bool:
        """Whether names begin with `stages.{index}.`, see `named_parameters`: then they depend on the cut."""
        return self._parameters.is_prefixed

    def state_dict(self, stage: int | None = None, *, keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and persistent buffers under those names: of one stage, or of all this rank's."""
        self.settle()
        return self._parameters.state_dict(stage, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dict, which may be the whole model's.

        Raises RuntimeError, before anything is loaded, if a name of this rank is missing or one belongs to no
        stage of the pipeline; not if strict=False. Raises it, too, if tied parameters would get different
        values. Collective if ranks have copies of a tied parameter. The next step raises AgreementError if
        copies of a stage in a mesh were given different values.
        """
        self.settle()
        self._parameters.load_state_dict(state_dict, strict=strict)
        self._engine.loaded = self._parameters.fingerprint()

    def _seeds(self, step: int | None = None) -> dict[int, int]:
        """Per stage, the seed of its microbatch 0 in a step; None: the next one."""
        step = self.num_steps if step is None else step
        # Processes that see different data draw different numbers.
        part = [self.place.data_part] if self.place.data_part else []
        return {stage: seed_of(self.seed, step, stage, *part) for stage in self.stages}
