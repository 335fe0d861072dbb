"""The counters, check results and value of one episode."""

from typing import Any

from rollbook.envs.builtin.awscli.tasks.checks import is_right
from rollbook.envs.builtin.awscli.tasks.faults import Chaos, ChaosFault
from rollbook.envs.builtin.awscli.tasks.grading import CheckResults, GradingRule
from rollbook.envs.builtin.awscli.tasks.setup import PreparedTask
from rollbook.envs.builtin.awscli.tasks.task_bank import NUM_HINTS

# A question has one goal: the right answer.
UNANSWERED = CheckResults(goals=(False,))
ANSWERED = CheckResults(goals=(True,))


class AwsEpisode:
    """Counts moves and hints, and computes rewards; `AwsCliEnvironment` runs the commands."""

    def __init__(self, prepared: PreparedTask, *, rule: GradingRule, chaos_scale: float) -> None:
        self.prepared = prepared
        self.moves = 0
        self.hints_used = 0
        self._is_answered = False
        self._rule = rule
        self._chaos = Chaos(prepared.task, seed=prepared.seed, scale=chaos_scale)
        self._start = UNANSWERED if prepared.task.answer else prepared.start
        self._results = self._start
        self._value = 0.0

    @property
    def is_solved(self) -> bool:
        return self._results.is_solved

    @property
    def is_last_move(self) -> bool:
        return self.moves >= self.prepared.task.step_limit

    @property
    def is_over(self) -> bool:
        return self.is_solved or self._is_answered or self.is_last_move

    def take_hint(self) -> None:
        self.hints_used = min(NUM_HINTS, self.hints_used + 1)

    def draw_fault(self) -> ChaosFault | None:
        return self._chaos.draw(is_last_move=self.is_last_move)

    async def update_results(self) -> None:
        """Run the checks again. A task that asks a question has none: any state is allowed."""
        if self.prepared.task.answer is None:
            self._results = await self.prepared.check_results()

    def answer(self, reply: str) -> bool:
        """Compare the reply with the answer that was true at the start. There is one attempt."""
        self._is_answered = True
        self._results = ANSWERED if is_right(self.prepared.truth, reply) else UNANSWERED
        return self.is_solved

    def take_reward(self) -> float:
        """The reward of this move: the current value less the value before the move."""
        value = self._rule.value(self._results, start=self._start, hints_used=self.hints_used)
        reward, self._value = value - self._value, value
        return reward

    def facts(self) -> dict[str, Any]:
        """For the viewer."""
        task = self.prepared.task
        if task.answer is None:
            names = [check.says for check in self.prepared.goals]
            goals = dict(zip(names, self._results.goals, strict=True))
            keeps = dict(zip((check.says for check in task.keeps), self._results.keeps, strict=True))
        else:
            goals, keeps = {"the answer is right": self.is_solved}, {}
        return {
            "task_id": task.id,
            "tier": task.tier.value,
            "seed": self.prepared.seed,
            "moves": self.moves,
            "move_limit": task.step_limit,
            "hints": self.hints_used,
            "hint_price": self._rule.hint_price,
            "score": round(self._value, 6),
            "goals": goals,
            "keeps": keeps,
            "drift": [fault.name for fault in self.prepared.faults],
            "chaos": self._chaos.num_faults,
        }
