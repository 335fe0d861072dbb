"""`Curriculum`: hands out what is worth practising next, by what came of earlier draws.

Nothing of it is saved. On a start the ledger tells what was drawn and what came of it (`rebuild`, then `recall`); from then on
`record_result` is the only way in which mastery changes. The next proposal is a function of the dataset, the settings, the seed and
the recorded draws, so it is the same after a restart. A draw's position is how many were handed out before it, its number how
often its task was: both only grow, and no group id is used twice.

One dispatcher at a time hears all results as they come. Several may share a run: each hears of the others' when it starts.
"""

from collections import deque
from collections.abc import Sequence

from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, GroupOutcome, GroupState
from rollbook.contracts.group import group_id as id_of
from rollbook.contracts.task import Draw, Task, TaskId
from rollbook.tasks.curriculum_config import CurriculumConfig
from rollbook.tasks.mastery import TaskMastery, success_of
from rollbook.tasks.mastery_log import MasteryLog, MasteryView, TierView
from rollbook.tasks.samplers import build_sampler
from rollbook.tasks.standings import LATE_DRAWS, MasteryRecord, Result
from rollbook.tasks.tiers import tiers_of, weights_of


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
        if not tasks:
            raise ValueError("a curriculum needs at least one task")
        self._rules = rules or CurriculumConfig()
        self._tasks = tuple(tasks)
        self._index = {task.id: at for at, task in enumerate(self._tasks)}
        if len(self._index) != len(self._tasks):
            raise ValueError(
                f"{len(self._tasks) - len(self._index)} tasks share their id with another; ids must be unique"
            )
        self._tiers = tiers_of(self._tasks, self._rules)
        self._record = MasteryRecord(self._tiers, weights_of(self._tasks, self._rules), self._rules)
        self._sampler = build_sampler(self._rules, seed=seed)
        self._log = log
        self._proposed: deque[Draw] = deque()
        self._gaps: deque[int] = deque()
        self._next = 0
        # Draws handed out and not settled, with their positions.
        self._open: dict[GroupId, int] = {}

    # ------------------------------------------------------------------ the port

    @property
    def needs_history(self) -> bool:
        return True

    def rebuild(self, progress: DrawProgress) -> None:
        """Take up the numbering where the ledger stands. What came of the draws is told by `recall`."""
        opened = set(progress.opened_beyond)
        self._next = max(progress.opened_below, max(opened, default=-1) + 1)
        self._gaps = deque(p for p in range(progress.opened_below, self._next) if p not in opened)
        self._proposed.clear()

    def recall(self, past: Sequence[PastDraw]) -> None:
        """Hear what the ledger remembers.

        Passed over: tasks that the dataset no longer has, and groups that somebody submitted unasked, which no curriculum drew.
        """
        for draw in past:
            task = self._index.get(draw.task_id)
            if task is None or draw.position is None:
                continue
            self._next = max(self._next, draw.position + 1)
            self._record.handed_out(task, draw.number, draw.position)
            if draw.state is GroupState.DISPATCHED:
                self._open[draw.group_id] = draw.position
            elif draw.outcome is not None:
                self._count(Draw(task_id=draw.task_id, number=draw.number, position=draw.position), draw.outcome)
        # Page by page, so that a long history is never held; a little behind, because pages may overlap in position.
        told = max((draw.position for draw in past if draw.position is not None), default=0)
        self._record.fold(open_from=min(self._open_from(), told - LATE_DRAWS))

    def propose(self, count: int) -> Sequence[Draw]:
        while len(self._proposed) < count:
            position = self._following()
            if position is None:
                break
            self._proposed.append(self._choose(position))
        return [self._proposed[i] for i in range(min(count, len(self._proposed)))]

    def taken(self, count: int) -> None:
        if count > len(self._proposed):
            raise ValueError(f"{count} draws were taken, but only {len(self._proposed)} are proposed")
        for _ in range(count):
            draw = self._proposed.popleft()
            self._open[id_of(draw.task_id, draw.number)] = draw.position

    def task(self, task_id: TaskId) -> Task:
        """The task with a row of its own: whoever plays it may change the row and poisons nobody."""
        index = self._index.get(task_id)
        if index is None:
            raise RunError(
                f"task {task_id!r} was drawn before, but the dataset no longer has it; "
                f"put it back, or start a new run directory for the new dataset"
            )
        return Task(id=task_id, row=self._tasks[index].row_copy())

    def observe(self, group_id: GroupId, position: int, outcome: GroupOutcome | None) -> None:
        task_id, _, number = group_id.rpartition("@")
        self.record_result(Draw(task_id=TaskId(task_id), number=int(number), position=position), outcome)

    @property
    def is_exhausted(self) -> bool:
        most = self._rules.draws
        return most is not None and not self._proposed and not self._gaps and self._next >= most

    # ------------------------------------------------------------------ mastery

    def record_result(self, draw: Draw, outcome: GroupOutcome | None) -> None:
        """What came of a draw. The only mutation of mastery; the first result of a draw counts, another one does not."""
        self._open.pop(id_of(draw.task_id, draw.number), None)
        if outcome is None or draw.task_id not in self._index or not self._count(draw, outcome):
            return
        if self._log is not None and self._log.is_due(self.num_draws):
            self._log.tell(self.view())

    @property
    def num_draws(self) -> int:
        """Handed out so far, by whomever."""
        return self._next - len(self._proposed) - len(self._gaps)

    def mastery(self, task_id: TaskId) -> TaskMastery:
        self._fold()
        return self._record.mastery(self._index[task_id])

    def view(self) -> MasteryView:
        """Where the curriculum stands, for display."""
        self._fold()
        standing = self._record.standing()
        tiers = []
        for rank, name in enumerate(self._tiers.names):
            members = self._record.ranks == rank
            drawn = members & (standing.num_draws > 0)
            tiers.append(
                TierView(
                    name=name,
                    is_open=rank <= self._record.progress.highest_open,
                    num_tasks=int(members.sum()),
                    num_drawn=int(drawn.sum()),
                    num_graduated=int((members & standing.is_graduated).sum()),
                    rate=float(standing.rate[drawn].mean()) if drawn.any() else None,
                )
            )
        return MasteryView(draws=self.num_draws, tiers=tuple(tiers))

    # ------------------------------------------------------------------ inside

    def _following(self) -> int | None:
        if self._gaps:
            return self._gaps.popleft()
        if self._rules.draws is not None and self._next >= self._rules.draws:
            return None
        self._next += 1
        return self._next - 1

    def _choose(self, position: int) -> Draw:
        self._fold()
        task = self._sampler.choose(self._record.standing(), position)
        draw = Draw(task_id=self._tasks[task].id, number=self._record.next_number(task), position=position)
        self._record.handed_out(task, draw.number, position)
        return draw

    def _count(self, draw: Draw, outcome: GroupOutcome) -> bool:
        success = success_of(outcome)
        if success is None:
            return False
        result = Result(draw.position, self._index[draw.task_id], draw.number, success)
        if self._record.is_kept(result):
            return False
        self._record.add(result)
        return True

    def _fold(self) -> None:
        if not self._record.is_folded:
            self._record.fold(open_from=self._open_from())

    def _open_from(self) -> int:
        """Every draw below is settled, or so old that nobody waits for it."""
        given_up = self._next - LATE_DRAWS
        # The ledger drops a group after its last attempt without telling: such a draw would stay here for ever.
        self._open = {group: position for group, position in self._open.items() if position >= given_up}
        waiting = (*self._open.values(), *(draw.position for draw in self._proposed), *self._gaps)
        return max(min(waiting, default=self._next), given_up)
