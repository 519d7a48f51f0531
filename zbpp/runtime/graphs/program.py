"""A rank's whole step as one graph: its actions, sends and receives.

The graph holds what Executor.run does. NCCL's communicators and the layouts of messages are there by then,
since eager steps came before. Messages need no fixed places of ours: they live inside the graph.

The seeds of the F's differ from step to step, and a generator can't be seeded inside a graph: each F has a
state of the generator of its own, which is seeded before the replay (Seeds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zbpp.runtime.executor import Executor
from zbpp.runtime.graphs.actions import RankActions, reason_of, seeded_outside
from zbpp.runtime.graphs.losses import StaticLosses
from zbpp.runtime.graphs.maker import GraphMaker, NotCapturable
from zbpp.runtime.layout import Message
from zbpp.runtime.measure import Recorder
from zbpp.schedule import Action, Op


class ProgramGraph:
    """The graph of one rank's step. Arguments as in ActionGraphs."""

    def __init__(
        self,
        rank: RankActions,
        maker: GraphMaker,
        losses: Mapping[int, StaticLosses],
        executor: Executor,
    ) -> None:
        self._rank, self._losses, self._at = rank, losses, "the program"
        self._forwards = [each for each in rank.actions() if each.op == Op.F]
        self._seeds = maker.seeds(len(self._forwards))
        executor.replace_actions({each: self._function(each) for each in rank.actions()}, {})
        try:
            with seeded_outside(rank.workers.values()), maker.capturing():
                self._replay = maker.capture(executor.run)
        except Exception as error:
            raise NotCapturable(f"{self._at} can't be captured ({reason_of(error)})") from error
        finally:
            self._seeds.restore()
            executor.replace_actions({}, {})
        # Receive buffers of eager steps may be inside the graph: they must live as long as it does.
        self._held = executor.receive_buffers()

    def _function(self, action: Action) -> Callable[[Message], Message]:
        function = self._rank.function(action)

        def run(message: Message) -> Message:
            self._at = str(action)
            if action.op == Op.F:
                self._seeds.use(self._forwards.index(action))
            made = function(message)
            if action.op == Op.F:
                self._losses[action.stage].take()
            return made

        return run

    def use(self, executor: Executor) -> None:
        """The executor has no part in a replay."""

    def begin(self) -> None:
        """A replayed step begins: set the seeds of its F's."""
        workers = self._rank.workers
        self._seeds.set([workers[each.stage].seed_of(each.microbatch) for each in self._forwards])

    def run(self, executor: Executor, recorder: Recorder | None) -> None:
        """Replay the step."""
        executor.note_captured()
        self._replay()
