"""Runs one rank's part of `step` and `evaluate`, and ends the pipeline when a call fails.

When a rank fails in a call:
1. It drops what is left of the call and closes its links (`_fail`, `end`).
2. On gloo, closing a link closes its connection. A rank that waits for a message of the failed rank gets a
   CommunicationError at once, with rank, instruction, value and peer. It fails, too, and so the failure goes
   on, link by link. On NCCL a rank can't see that the other end of a link is closed, and the device waits for
   the message, not the program: at the timeout torch's watchdog ends the waiting process.
3. Every later call raises RuntimeError with the first reason (`over`): make a new Pipeline on every rank.

If a process dies, its connections close with it on gloo, and the other ranks fail as in point 2. On NCCL they
wait until the timeout.

A rank that waits for no message of a failed rank does not notice the failure. Such a rank may have finished
the call, and wait for all ranks in the `gather` of `clip_grad_norm_`, `timeline` or `close`. The `gather`
runs on the group that the caller gave, which a failed rank does not close. If the failed rank's process stays
alive, the other rank waits there until that group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from torch import Tensor, nn

from zbpp.error_text import error_text
from zbpp.runtime.call import Call, Result
from zbpp.runtime.call_order import CallOrder
from zbpp.runtime.executor import BeginAgain, Executor
from zbpp.runtime.extra import Extra
from zbpp.runtime.gradient_release import GradientRelease
from zbpp.runtime.microbatch import Cutter
from zbpp.runtime.named_losses import NamedLosses
from zbpp.runtime.posts import Posts
from zbpp.runtime.rank_parts import RankParts
from zbpp.runtime.reductions import Reductions
from zbpp.runtime.restored import Buffers, GradientsBefore, InPlaceChanges
from zbpp.runtime.world import CommunicationError

_HALF_UPDATED = "since gradients are released, some of its weights and optimizer states have been updated"
_RELOAD = "load weights and optimizer states of an earlier step on every rank"

Settle = Callable[[], Call | None]
"""What a step does at its gate: it learns whether the weights are right, and makes them right.

It returns None if they were right, so that the F's before the gate are valid. If they were not, it returns
the call with which the step begins again.
"""


_RELEASED = "gradient release drops the gradients that post-validation may need again: leave one of them out"


class Engine:
    """The stages and links of one rank, with a program for `step`, one for `evaluate` and one for `predict`.

    over: why no call may follow; empty until then. loaded: see CallOrder. posts: what the ranks post about
    their updates; None where no step has a gate. has_changed_inputs: with posts, whether a stage has changed,
    in place, what a step was given from outside; such a step could not begin again.
    order_of_copies: checks that all copies of this rank make the same calls; None where there is one copy.
    """

    def __init__(self, parts: RankParts, order_of_copies: CallOrder | None) -> None:
        self.over, self.loaded, self.has_changed_inputs = "", 0, False
        self._gradient_release: GradientRelease | None = None
        self.posts: Posts | None = None
        self._parts, self._order_of_copies = parts, order_of_copies
        self._workers, self._executors = parts.workers, parts.executors
        self._weights_on_host = parts.weights_on_host
        self._order_of_ranks = parts.order_of_ranks
        self._timetable = parts.timetable
        self._buffers = Buffers(parts.modules)
        self._before: GradientsBefore | None = None  # the gradients of the step that runs
        self._inputs = InPlaceChanges(())
        self.reductions: Reductions | None = None

    def release_gradients(self, release: GradientRelease | None) -> None:
        """From the next step on, let `release` have the gradients; None: they stay.

        Raises ValueError for weights that live on the host.
        """
        if release is not None and self._weights_on_host is not None:
            raise ValueError(
                "gradient release doesn't go with offloaded weights, whose gradients are on the host: leave "
                "one of them out"
            )
        if release is not None and self.posts is not None:
            raise ValueError(_RELEASED)
        if release is not None:
            self._parts.extras.check_named("gradient_release")
        self._gradient_release = release
        if self.reductions is not None:
            self.reductions.gradient_release = release
        for stage, worker in self._workers.items():
            worker.release_leaves(None if release is None else partial(release.leaf_done, stage))

    @property
    def num_steps(self) -> int:
        """See Pipeline."""
        return self._parts.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._parts.num_steps = number

    @property
    def gate_refusal(self) -> str:
        """Why no step can have a gate, or nothing."""
        if self._gradient_release is not None:
            return _RELEASED
        try:
            self._parts.extras.check_named("post_validation")
        except ValueError as error:
            return str(error)
        if self._weights_on_host is not None:
            return (
                "post-validation doesn't go with offloaded weights, whose copies on the device it would not "
                "take back: leave one of them out"
            )
        return ""

    @property
    def released_squares(self) -> Mapping[int, Tensor]:
        """See Pipeline."""
        return {} if self._gradient_release is None else self._gradient_release.squares

    def step(
        self,
        call: Call,
        seeds: Mapping[int, int],
        settle: Settle | None = None,
        *,
        kind: str = "step",
    ) -> Result:
        """Train on one batch; returns the losses. seeds: per stage, of its microbatch 0.

        settle: what the step does at its gate; None: there is no gate. kind: must be equal on all ranks.
        """
        return self._run("step", call, seeds, settle, kind)

    def meet(self, name: str) -> None:
        """Before a collective call: raise AgreementError if a linked rank, or a copy, makes another one."""
        self._check_not_over()
        if self._order_of_ranks is not None:
            self._order_of_ranks.meet(name)
        if self._order_of_copies is not None:
            self._order_of_copies.meet(name, self._hash_of_trained(), self.loaded)

    def evaluate(self, call: Call, seeds: Mapping[int, int]) -> Result:
        """Forward of one batch, whose shapes may be others than the last one's; returns the losses."""
        self._executors["evaluate"].forget_layouts()
        return self._run("evaluate", call, seeds, None)

    def predict(self, call: Call, seeds: Mapping[int, int]) -> None:
        """Forward of one microbatch, whose shapes may be others than the last one's."""
        self._executors["predict"].forget_layouts()
        self._run("predict", call, seeds, None)

    def use(self, extra: Extra) -> None:
        """Take an extra, from the next call on. Collective. Raises ValueError if another one excludes it."""
        self._parts.extras.check(extra)
        extra.attach(self._parts)
        self._parts.extras.append(extra)
        self._parts.rebind()

    def leave(self, extra: Extra) -> None:
        """From the next call on, run without this extra."""
        if not self.over:  # else all extras are closed already
            self._parts.extras.remove(extra)
            self._parts.rebind()
            extra.close()

    def fail(self, error: BaseException) -> None:
        """Tell the extras of an error that was raised between calls and ends the pipeline."""
        self._parts.extras.fail(error)

    def receive_buffers(self) -> list[Tensor]:
        """The pool of `step`."""
        return self._executors["step"].receive_buffers()

    def _run(
        self,
        name: str,
        call: Call,
        seeds: Mapping[int, int],
        settle: Settle | None,
        kind: str = "",
    ) -> Result:
        """Run the program `name`. kind: what ranks compare, if not the name."""
        self._check_not_over()
        self._before, executor, call = None, self._executors[name], call._replace(kind=name)
        try:
            cutter = self._begin(call, seeds, 1 if name == "predict" else self._timetable.num_microbatches)
            if self._order_of_ranks is not None:
                self._order_of_ranks.begin(kind or name, cutter.rows)
            if self._order_of_copies is not None:
                self._order_of_copies.begin(kind or name, cutter.rows, self._hash_of_trained(), self.loaded)
            release = self._gradient_release if name == "step" else None
            if name == "step" and settle is None:
                self._before = GradientsBefore(self._trained())
            if release is not None:
                release.begin(call.loss_scale, has_graph=cutter.has_graph)
            if self._weights_on_host is not None:
                self._weights_on_host.begin()
            self._parts.extras.begin(call)
            if settle is None:
                executor.run()
            else:
                cutter = self._run_with_gate(executor, seeds, settle) or cutter
            ended = [worker.end() for worker in self._workers.values()]
            cutter.backward()
            if release is not None:
                release.finish()
            self.has_changed_inputs |= self._inputs.are_found()
            losses = [loss for each in ended for loss in each.losses]
            result = Result(losses, NamedLosses([each.named for each in ended], cutter.num_microbatches))
            self._parts.extras.end(call, result)
        except BaseException as error:
            self._fail(error, self._before)
            raise
        finally:
            self._before, self._inputs = None, InPlaceChanges(())
            if self._weights_on_host is not None:
                self._weights_on_host.end()
        return result

    def _begin(self, call: Call, seeds: Mapping[int, int], num_microbatches: int) -> Cutter:
        """Give the stages their parts of a call."""
        cutter = Cutter(num_microbatches)
        feeds = call.feeds(cutter, seeds, last_stage=self._timetable.num_stages - 1)
        if self.posts is not None:
            given = [(feed.args, feed.kwargs, feed.targets) for feed in feeds.values()]
            frozen = [each for each in self._trained() if not each.requires_grad]
            self._inputs = InPlaceChanges([given, frozen])
        for stage, worker in self._workers.items():
            worker.begin(feeds[stage])
        return cutter

    def _run_with_gate(self, executor: Executor, seeds: Mapping[int, int], settle: Settle) -> Cutter | None:
        """Run a step whose F's before its gate may have to run again; then returns the new call's Cutter."""
        self._buffers.keep()
        trained = list(self._trained())  # a sharded stage has others while its weights are gathered
        again: Call | None = None

        def is_valid() -> bool:
            nonlocal again
            again = settle()
            if again is None:  # from here on the step adds to gradients
                self._before = GradientsBefore(trained)
            return again is None

        try:
            executor.run(is_valid)
            return None
        except BeginAgain as error:
            executor.drop_messages()
            self._parts.abandon()
            self._parts.extras.fail(error)
        assert again is not None  # it was set at the gate
        self._buffers.restore()
        cutter = self._begin(again, seeds, self._timetable.num_microbatches)
        self._before = GradientsBefore(trained)
        self._parts.extras.begin(again)
        executor.run()
        return cutter

    def _check_not_over(self) -> None:
        if self.over:
            raise RuntimeError(f"{self.over}: make a new Pipeline")

    def _hash_of_trained(self) -> int:
        return hash(tuple((each.requires_grad, *each.shape) for each in self._trained()))

    def _trained(self) -> Iterable[nn.Parameter]:
        """The parameters that a step of this rank may add gradients to, each once."""
        return dict.fromkeys(parameter for module in self._parts.modules for parameter in module.parameters())

    def _fail(self, error: BaseException, before: GradientsBefore | None) -> None:
        """Drop the microbatches of a failed call. A pipeline of several ranks or replicas ends here."""
        self._parts.abandon()
        self._parts.extras.fail(error)
        left = "" if before is None else before.restore()
        if left:
            error.add_note(left)
        is_half_updated = (
            before is not None and self._gradient_release is not None and self._gradient_release.has_updated
        )
        if is_half_updated:
            error.add_note(f"{_HALF_UPDATED}: {_RELOAD}")
            self.end(f"an earlier step failed ({error_text(error)}), and {_HALF_UPDATED}, {_RELOAD}")
        elif not self.over and (
            self._timetable.num_ranks > 1 or any(each.is_shared for each in self._parts.extras)
        ):
            self.end(f"an earlier call failed ({error_text(error)}), and its messages are lost")
        if isinstance(error, CommunicationError):
            for order in (self._order_of_ranks, self._order_of_copies):
                with suppress(CommunicationError):  # the store may be gone, too
                    # The peer may have closed its links because it is in another call: then raise that error.
                    if order is not None:
                        order.check()

    def end(self, why: str) -> None:
        """Close links and reductions for good: on gloo, processes that wait for this one stop waiting."""
        self.over = why
        if self.posts is not None:
            with suppress(RuntimeError):  # the store may be gone, too
                self.posts.give_up(why)
        self._parts.close()
