"""What a Trainer in a pipeline says at its start: the cut, the plan, its bubble, and what each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zbpp.schedule import Timetable, simulate

_MORE = (4, 8)  # microbatches, to compare with fewer


def report(
    name: str,
    timetable: Timetable,
    layers: Sequence[int],
    held: Sequence[int],
    planned: Callable[[int], Timetable],
    num_replicas: int = 1,
) -> str:
    """Lines to print.

    name: of the schedule. layers: of each stage. held: parameters that each rank of a pipeline has. planned:
    the timetable for another number of microbatches.
    """
    num_ranks, num_microbatches = timetable.num_ranks, timetable.num_microbatches
    counts = ", ".join(map(str, layers))
    pipelines = f"{num_replicas} pipelines of " if num_replicas > 1 else ""
    lines = [
        f"{name}: {pipelines}{num_ranks} ranks, stages of {counts} layers, "
        f"{num_microbatches} microbatches a step",
        f"parameters: {', '.join(f'{each / 1e6:,.1f} M' for each in held)} on ranks 0 to {num_ranks - 1}",
        f"predicted bubble: {_percent(timetable)} if F, B and W take equally long",
    ]
    if num_ranks > 1 and num_microbatches < _MORE[0]:
        others = ", ".join(f"with {more} {_percent(planned(more))}" for more in _MORE)
        lines.append(
            f"gradient_accumulation_steps={num_microbatches} are all microbatches that there are; the bubble "
            f"would be {others}: write more of them, with a smaller per_device_train_batch_size"
        )
    return "\n".join(f"zbpp: {line}" for line in lines)


def _percent(timetable: Timetable) -> str:
    return f"{100 * simulate(timetable).bubble_rate:.0f} %"
