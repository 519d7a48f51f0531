"""What an error says of the instruction that raised it: which action or which message, on which rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zbpp.runtime.out_of_memory import is_out_of_memory
from zbpp.runtime.world import CommunicationError
from zbpp.schedule import Action, Op, Send
from zbpp.schedule.lower import Instruction
from zbpp.schedule.offload import Transport

_PARTS = {
    Op.F: "F, the forward",
    Op.B: "B, the backward",
    Op.W: "W, the weights' gradients",
    Op.BW: "the backward",
}


def explain(
    error: Exception,
    instructions: Sequence[Instruction | None],
    position: int,
    rank: int,
    *,
    at_gate: bool,
) -> None:
    """Note the action on its error; raise another error for a message that failed, or that may not be sent.

    instructions: of the pass; None for what is no instruction. position: of the one that failed. rank: in the
    pipeline. Errors of reductions say more themselves.
    """
    instruction = instructions[position]
    if isinstance(instruction, Action):
        error.add_note(_where(instruction, rank))
        return
    if isinstance(instruction, Transport):
        error.add_note(f"in {instruction} on rank {rank}")
        return
    speaks_for_itself = is_out_of_memory(error) or isinstance(error, CommunicationError)
    if speaks_for_itself or at_gate:
        return
    if isinstance(error, RuntimeError):
        number = sum(each is not None for each in instructions[:position])
        if instruction is not None:
            place = f"instruction {number} of its program ({instruction})"
        else:
            place = "its first receives" if number == 0 else "its last sends"
        raise CommunicationError.at(f"rank {rank}, {place}", error) from None
    if isinstance(error, ValueError) and isinstance(instruction, Send):
        message = f"{instruction.value} from rank {rank} to rank {instruction.peer}"
        raise ValueError(f"{message}: {error}") from None


def _where(action: Action, rank: int) -> str:
    """`in 1B3 (B, the backward, of stage 1, microbatch 3) on rank 1`."""
    part = f"{_PARTS[action.op]}, of stage {action.stage}, microbatch {action.microbatch}"
    process = dist.get_rank() if dist.is_initialized() else rank
    of_job = "" if process == rank else f" of its pipeline, rank {process} of the job"
    return f"in {action} ({part}) on rank {rank}{of_job}"
