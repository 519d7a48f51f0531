"""Pipeline.step: executes one rank's program, in order. It never chooses.

    timetable --lower--> program --resolve--> [(what to call, with which values)] --run--> .grad

Everything that can be known before the first step is resolved in the constructor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.measure import Recorder
from zbpp.runtime.microbatch import split, split_keywords
from zbpp.runtime.p2p import BufferPool, Inbox, Message, Outbox
from zbpp.runtime.stage import Feed, Loss, StageWorker
from zbpp.runtime.world import CommunicationError, check_agreement, gather, link_groups
from zbpp.schedule import (
    Action,
    Op,
    Program,
    Recv,
    Release,
    Send,
    Timetable,
    Value,
    consumes,
    lower,
    produces,
)
from zbpp.seeding import seed_of

_MESSAGES = ("x", "g")  # the values that can travel; the others stay with their stage


class Pipeline:
    """One rank of a pipeline.

    stages: {stage index: module}, exactly those that `timetable` gives to this rank.
    loss_fn(output, target) -> scalar; None if the last stage's module returns the loss.
    group: the pipeline's process group (None: the default one); a pipeline of one rank needs none.
    seed: of the random numbers drawn in forward. timeout: seconds that a wait for another rank may last.
    Raises ValueError for stages or a group that don't fit the timetable, AgreementError if the
    ranks' timetables differ. Collective over the group.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        timetable: Timetable,
        loss_fn: Loss | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        self.timetable, self.seed, self.num_steps = timetable, seed, 0
        self.recorder: Recorder | None = None
        self.group = group
        self.rank = _rank_in(group, timetable)
        if timetable.num_ranks > 1:
            digest = hashlib.sha256(str(timetable).encode()).hexdigest()[:16]
            check_agreement("timetables (by hash)", digest, group)
        _check_stages(stages, timetable, group)
        self.device = _device_of(stages, group)
        last = timetable.num_stages - 1
        self._workers = {
            index: StageWorker(
                index, stages[index], is_last=index == last, loss_fn=loss_fn, device=self.device
            )
            for index in timetable.stages_of(self.rank)
        }
        programs, evaluation = lower(timetable), lower(timetable.forward_only())
        groups = link_groups(group, programs.links, timeout, self.device) if programs.links else {}
        num_stages = timetable.num_stages
        self._train = _Pass(programs[self.rank], self._workers, _TRAIN, num_stages, groups, self.device)
        self._evaluate = _Pass(
            evaluation[self.rank], self._workers, _EVALUATE, num_stages, groups, self.device
        )
        self._failure: str | None = None

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The modules owned by this rank."""
        return {index: worker.module for index, worker in self._workers.items()}

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """Forward and backward of one whole batch; see `zbpp` for who passes what.

        Tensors are split along dim 0 into microbatches (`zbpp.replicate(tensor)` is not); the owner
        of stage 0 passes args, the owner of the last stage target; kwargs go to every stage
        owned here. Adds to each `.grad` the mean over microbatches, and returns the microbatches'
        losses on the last stage's owner, [] elsewhere.
        """
        with _restored_generators(self.device):
            losses = self._run(self._train, args, target, kwargs, self.recorder)
        self.num_steps += 1
        return losses

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """The forward of one batch in eval mode, without gradients; shapes may differ from step's."""
        self._evaluate.forget_layouts()
        with _restored_generators(self.device), _eval_mode(self.stages), torch.no_grad():
            return self._run(self._evaluate, args, target, kwargs, None)

    def _run(
        self,
        program: _Pass,
        args: tuple[Any, ...],
        target: Any,
        kwargs: dict[str, Any],
        recorder: Recorder | None,
    ) -> list[Tensor]:
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step failed ({self._failure}), and messages of it are lost: make a new Pipeline"
            )
        try:
            for index, worker in self._workers.items():
                worker.begin(self._feed(index, args, target, kwargs))
            losses = self._finish(program, recorder)
        except BaseException:
            for worker in self._workers.values():
                worker.abandon()
            raise
        return next((each for each in losses if each), [])

    def _finish(self, program: _Pass, recorder: Recorder | None) -> list[list[Tensor]]:
        try:
            program.run(recorder)
            return [worker.end() for worker in self._workers.values()]
        except BaseException as error:
            if self.timetable.num_ranks > 1:  # links may be left in the middle
                self._failure = f"{type(error).__name__}: {error}"
            raise

    def _feed(self, stage: int, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any]) -> Feed:
        num = self.timetable.num_microbatches
        if stage == 0 and not (args or kwargs):
            raise ValueError("this rank owns stage 0: pass the batch's inputs to step()")
        inputs = [split(f"argument {i}", value, num) for i, value in enumerate(args)] if stage == 0 else []
        return Feed(
            args=list(zip(*inputs, strict=True)) if inputs else [()] * num if stage == 0 else (),
            kwargs=split_keywords(kwargs, num),
            targets=None if target is None else split("target", target, num),
            seeds=[seed_of(self.seed, self.num_steps, stage, microbatch) for microbatch in range(num)],
        )


Work = Callable[[StageWorker, int, Message], Message]

_TRAIN: dict[Op, Work] = {
    Op.F: StageWorker.forward,
    Op.B: StageWorker.backward_input,
    Op.W: StageWorker.backward_weight,
    Op.BW: StageWorker.backward,
}
_EVALUATE: dict[Op, Work] = {Op.F: StageWorker.evaluate}


class _Act(NamedTuple):
    """An action, resolved: which method of which worker, what it takes and gives."""

    work: Work
    worker: StageWorker
    microbatch: int
    takes: Value | None
    gives: Value | None


class _Pass:
    """A program with its links: what one call of step or evaluate runs through."""

    def __init__(
        self,
        program: Program,
        workers: Mapping[int, StageWorker],
        work: Mapping[Op, Work],
        num_stages: int,
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self.rank = program.rank
        self._pool = BufferPool(device)
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._connect(program, groups)
        needed = {value for step in program.instructions for value in _needs(step)}
        self._steps = [
            (step, _resolve(step, workers, work, num_stages, needed) if isinstance(step, Action) else None)
            for step in program.instructions
        ]

    def _connect(self, program: Program, groups: Mapping[tuple[int, int], dist.ProcessGroup]) -> None:
        incoming = [step for step in program.instructions if isinstance(step, Recv)]
        for peer in sorted({step.peer for step in incoming}):
            channels = [_channel(step.value) for step in incoming if step.peer == peer]
            # A link's group has two ranks: 0 is the lower one.
            self._inboxes[peer] = Inbox(
                int(peer > self.rank), groups[peer, self.rank], self._pool, channels, program.in_flight[peer]
            )
        for peer in sorted({step.peer for step in program.instructions if isinstance(step, Send)}):
            self._outboxes[peer] = Outbox(int(peer > self.rank), groups[self.rank, peer], self._pool.device)

    def forget_layouts(self) -> None:
        """Agree on shapes anew: each channel's next message carries a header, and old buffers go."""
        self._pool.clear()
        for inbox in self._inboxes.values():
            inbox.layouts.clear()
        for outbox in self._outboxes.values():
            outbox.layouts.clear()

    def run(self, recorder: Recorder | None) -> None:
        """Run the program once. Afterwards mailbox and links are empty."""
        mailbox: dict[Value, Message] = {}
        if recorder is not None:  # first, since it synchronises, and receives end only when they are sent
            recorder.begin()
        for peer, inbox in self._inboxes.items():
            with self._naming(0, f"the first receive from {peer}"):
                inbox.begin()
        for position, (step, act) in enumerate(self._steps):
            match step:
                case Action():
                    assert act is not None  # resolved in the constructor
                    self._act(act, mailbox, recorder)
                case Recv(value, peer):
                    with self._naming(position, step):
                        mailbox[value] = self._inboxes[peer].receive()
                case Send(value, peer):
                    with self._naming(position, step):
                        self._send(value, peer, mailbox.pop(value))
                case Release(_, peer):
                    with self._naming(position, step):
                        self._outboxes[peer].release()
        for peer, outbox in self._outboxes.items():
            with self._naming(len(self._steps), f"the last sends to {peer}"):
                outbox.finish()
        if mailbox:
            raise RuntimeError(f"a step ended with values left over: {', '.join(map(str, mailbox))}")

    def _act(self, act: _Act, mailbox: dict[Value, Message], recorder: Recorder | None) -> None:
        message = () if act.takes is None else mailbox.pop(act.takes)
        if recorder is not None:
            recorder.start()
        result = act.work(act.worker, act.microbatch, message)
        if recorder is not None:
            recorder.stop()
        if act.gives is not None:
            mailbox[act.gives] = result

    def _send(self, value: Value, peer: int, message: Message) -> None:
        try:
            self._outboxes[peer].send(_channel(value), message)
        except ValueError as error:
            raise ValueError(f"{value} from rank {self.rank} to rank {peer}: {error}") from None

    @contextmanager
    def _naming(self, position: int, step: object) -> Iterator[None]:
        """Say who waited for what when a wait fails."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            where = f"rank {self.rank}, step {position} of its program ({step})"
            raise CommunicationError.at(where, error) from error


def _channel(value: Value) -> tuple[str, int]:
    """Messages of one kind for one stage have one layout."""
    return value.name, value.stage


def _needs(step: object) -> tuple[Value, ...]:
    match step:
        case Action() as action:
            return consumes(action)
        case Send(value, _):
            return (value,)
        case _:
            return ()


def _resolve(
    action: Action,
    workers: Mapping[int, StageWorker],
    work: Mapping[Op, Work],
    num_stages: int,
    needed: set[Value],
) -> _Act:
    takes = [value for value in consumes(action) if value.name in _MESSAGES]
    gives = [value for value in produces(action, num_stages) if value.name in _MESSAGES and value in needed]
    return _Act(
        work[action.op],
        workers[action.stage],
        action.microbatch,
        takes[0] if takes else None,
        gives[0] if gives else None,
    )


def _rank_in(group: dist.ProcessGroup | None, timetable: Timetable) -> int:
    if timetable.num_ranks == 1:
        return 0
    if not dist.is_initialized():
        raise ValueError(
            f"the timetable is for {timetable.num_ranks} ranks, but there is no process group: start the job "
            "with torchrun and call torch.distributed.init_process_group, or plan for one rank"
        )
    size = dist.get_world_size(group)
    if size != timetable.num_ranks:
        raise ValueError(f"the timetable is for {timetable.num_ranks} ranks, the process group has {size}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the process group that it was given for the pipeline")
    return rank


def _check_stages(
    stages: Mapping[int, nn.Module], timetable: Timetable, group: dist.ProcessGroup | None
) -> None:
    """Every rank looks at all, and raises: none is left waiting for one that went away."""
    given = gather(sorted(stages), group) if timetable.num_ranks > 1 else [sorted(stages)]
    for rank, found in enumerate(given):
        expected = timetable.stages_of(rank)
        if found != expected:
            raise ValueError(f"rank {rank} owns stages {expected} of this timetable, got modules for {found}")


def _device_of(stages: Mapping[int, nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """Where the stages' tensors are; for stages without any, where the group's messages go."""
    tensors = (tensor for module in stages.values() for tensor in (*module.parameters(), *module.buffers()))
    on_cuda = dist.is_initialized() and "nccl" in dist.get_backend(group)
    default = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return next((tensor.device for tensor in tensors), default)


@contextmanager
def _restored_generators(device: torch.device) -> Iterator[None]:
    """What a step draws is seeded by its place; the caller's own random numbers go on undisturbed."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def _eval_mode(stages: Mapping[int, nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for stage in stages.values() for module in stage.modules()]
    for stage in stages.values():
        stage.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
