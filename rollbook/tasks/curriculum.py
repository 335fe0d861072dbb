"""`Curriculum`: chooses the next tasks by the outcomes of earlier draws.

Nothing is saved. At a start the ledger provides the past draws with their outcomes (`rebuild`, then `recall`). After that mastery
changes by `record_result`, for draws of this dispatcher, and by `recall`, for those of others. The next proposal is a function of
dataset, settings, seed and recorded draws, so it is the same after a restart. A draw's position counts all earlier draws, its
number counts those of its task; both only grow with the opened draws, so no group id is used twice.

With several dispatchers in one run, each has its own curriculum, and the outcomes of the others reach it within seconds. Draws that
two of them choose at the same moment may share a position.
"""

from collections.abc import Sequence

from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState
from rollbook.contracts.group import group_id as id_of
from rollbook.contracts.task import Draw, Task, TaskId
from rollbook.tasks.config import CurriculumConfig
from rollbook.tasks.cursor import DrawQueue, TaskTable
from rollbook.tasks.mastery import (
    LATE_DRAWS,
    MasteryRecord,
    ProposedDraw,
    Result,
    TaskMastery,
    success_of,
    tiers_of,
    weights_of,
)
from rollbook.tasks.mastery_log import MasteryLog, MasteryView, TierView
from rollbook.tasks.samplers import build_sampler


class Curriculum:
    """Satisfies `TaskSource`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        rules: CurriculumConfig | None = None,
        *,
        seed: int = 0,
        log: MasteryLog | None = None,
    ) -> None:
        rules = rules or CurriculumConfig()
        self._table = TaskTable(tasks)
        self._queue = DrawQueue(self._draw_at, end=rules.draws)
        self._tiers = tiers_of(tasks, rules)
        self._record = MasteryRecord(self._tiers, weights_of(tasks, rules), rules)
        self._sampler = build_sampler(rules, seed=seed)
        self._log = log
        if log is not None and len(self._tiers.names) > 1:
            ranks = zip(self._table.tasks, self._tiers.ranks, strict=True)
            log.write_tiers({task.id: self._tiers.names[rank] for task, rank in ranks})
        self._unsettled: dict[GroupId, int] = {}
        """Positions of draws that were taken and are not settled."""
        self._proposed: dict[GroupId, ProposedDraw] = {}
        """The draws that were proposed and not taken, in order."""

    @property
    def needs_history(self) -> bool:
        return True

    def rebuild(self, progress: DrawProgress) -> None:
        # Draws that were never opened must not count: their tasks would be passed over.
        for draw in reversed(self._proposed.values()):
            self._record.remove_draw(draw)
        self._proposed.clear()
        self._queue.rebuild(progress)

    def catch_up(self, progress: DrawProgress) -> None:
        self.rebuild(progress)

    def recall(self, past: Sequence[PastDraw]) -> None:
        """Count past draws, and draws of other dispatchers.

        Ignores tasks that the dataset no longer has, and groups that were submitted without a draw.
        """
        for draw in past:
            task = self._table.index.get(draw.task_id)
            if task is None or draw.position is None:
                continue
            self._queue.next_position = max(self._queue.next_position, draw.position + 1)
            self._proposed.pop(draw.group_id, None)
            self._record.add_draw(task, draw.number, draw.position)
            if draw.state is GroupState.DISPATCHED:
                self._unsettled[draw.group_id] = draw.position
                continue
            self._unsettled.pop(draw.group_id, None)
            if draw.outcome is not None:
                self._add_result(Draw(task_id=draw.task_id, number=draw.number, position=draw.position), draw.outcome)
        # Fold page by page, so that a long history is never in memory; a little behind, because pages overlap in position.
        last = max((draw.position for draw in past if draw.position is not None), default=0)
        self._record.fold(settled_below=min(self._settled_below(), last - LATE_DRAWS))

    def propose(self, count: int) -> Sequence[Draw]:
        return self._queue.propose(count)

    def taken(self, count: int) -> None:
        for draw in self._queue.take(count):
            group = id_of(draw.task_id, draw.number)
            self._proposed.pop(group, None)
            self._unsettled[group] = draw.position

    def task(self, task_id: TaskId) -> Task:
        return self._table.copy(task_id)

    def observe(self, group_id: GroupId, position: int, outcome: GroupOutcome | None) -> None:
        task_id, _, number = group_id.rpartition("@")
        self.record_result(Draw(task_id=TaskId(task_id), number=int(number), position=position), outcome)

    @property
    def is_exhausted(self) -> bool:
        return self._queue.is_exhausted

    def record_result(self, drawn: Draw | Task | TaskId | str, outcome: GroupOutcome | float | None) -> None:
        """The outcome of a draw. Nothing else changes mastery, and only the first result of a draw counts.

        With a task in place of a draw, it is that of the task's oldest draw without a result. If there is none, the result counts
        as that of a new draw, so `propose` and `taken` are not needed. A number is the mean reward of the draw, 1 for success.
        """
        draw = drawn if isinstance(drawn, Draw) else self._oldest_unsettled(drawn) or self._new_draw(drawn)
        outcome = _outcome_of(outcome) if isinstance(outcome, float | int) else outcome
        self._unsettled.pop(id_of(draw.task_id, draw.number), None)
        if outcome is None or draw.task_id not in self._table.index or not self._add_result(draw, outcome):
            return
        if self._log is not None and self._log.is_due(self.num_draws):
            self._log.write(self.view())

    def _oldest_unsettled(self, task: Task | TaskId | str) -> Draw | None:
        task_id = task.id if isinstance(task, Task) else TaskId(task)
        own = [(position, group) for group, position in self._unsettled.items() if group.rpartition("@")[0] == task_id]
        if not own:
            return None
        position, group = min(own)
        return Draw(task_id=task_id, number=int(group.rpartition("@")[2]), position=position)

    def _new_draw(self, task: Task | TaskId | str) -> Draw:
        """A draw that the caller played without proposing it."""
        task_id = task.id if isinstance(task, Task) else TaskId(task)
        index = self._table.index.get(task_id)
        if index is None:
            raise RunError(f"task {task_id} is not in the dataset of this curriculum")
        draw = Draw(task_id=task_id, number=self._record.next_number(index), position=self._queue.next_position)
        self._queue.next_position += 1
        self._record.add_draw(index, draw.number, draw.position)
        return draw

    @property
    def num_draws(self) -> int:
        """Draws taken so far, by all dispatchers."""
        return self._queue.next_position - len(self._queue.untaken)

    def mastery(self, task_id: TaskId) -> TaskMastery:
        self._fold()
        return self._record.mastery(self._table.index[task_id])

    def view(self) -> MasteryView:
        """State of the curriculum, for display."""
        self._fold()
        states = self._record.task_states()
        tiers = []
        for rank, name in enumerate(self._tiers.names):
            members = self._record.ranks == rank
            drawn = members & (states.num_draws > 0)
            tiers.append(
                TierView(
                    name=name,
                    is_open=rank <= self._record.progress.highest_open,
                    num_tasks=int(members.sum()),
                    num_drawn=int(drawn.sum()),
                    num_graduated=int((members & states.is_graduated).sum()),
                    rate=float(states.rate[drawn].mean()) if drawn.any() else None,
                )
            )
        return MasteryView(draws=self.num_draws, tiers=tuple(tiers))

    def _draw_at(self, position: int) -> Draw:
        self._fold()
        task = self._sampler.choose(self._record.task_states(), position)
        draw = Draw(task_id=self._table.tasks[task].id, number=self._record.next_number(task), position=position)
        self._proposed[id_of(draw.task_id, draw.number)] = self._record.add_draw(task, draw.number, position)
        return draw

    def _add_result(self, draw: Draw, outcome: GroupOutcome) -> bool:
        success = success_of(outcome)
        if success is None:
            return False
        result = Result(draw.position, self._table.index[draw.task_id], draw.number, success)
        if self._record.has_result(result.task, result.number):
            return False
        self._record.add_result(result)
        return True

    def _fold(self) -> None:
        if not self._record.is_folded:
            self._record.fold(settled_below=self._settled_below())

    def _settled_below(self) -> int:
        """Every draw below this position is settled, or too old to wait for."""
        oldest = self._queue.next_position - LATE_DRAWS
        # The ledger drops a group after its last attempt without a message; such a draw would stay here forever.
        self._unsettled = {group: position for group, position in self._unsettled.items() if position >= oldest}
        waiting = (*self._unsettled.values(), *self._queue.untaken)
        return max(min(waiting, default=self._queue.next_position), oldest)


def _outcome_of(reward: float) -> GroupOutcome:
    return GroupOutcome(
        num_samples=1,
        num_scorable=1,
        reward_mean=reward,
        reward_std=None,
        solved_rate=None,
        truncated_rate=0.0,
        mean_turns=0.0,
        mean_response_tokens=0.0,
        seconds=0.0,
    )
