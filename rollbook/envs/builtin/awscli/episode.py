"""One episode's account: moves, hints, how the environment stands, and what each change was worth."""

from typing import Any

from rollbook.envs.builtin.awscli.chaos import Chaos, ChaosFault
from rollbook.envs.builtin.awscli.grading import GradingRule, Standing
from rollbook.envs.builtin.awscli.setting import Setting
from rollbook.envs.builtin.awscli.task_bank import NUM_HINTS
from rollbook.envs.builtin.awscli.verification import call_of, is_right

# A question has one goal: the right answer.
UNANSWERED = Standing(goals=(False,))
ANSWERED = Standing(goals=(True,))


class AwsEpisode:
    """Counts and values; the environment around it acts."""

    def __init__(self, setting: Setting, *, rule: GradingRule, chaos_scale: float) -> None:
        self.setting = setting
        self.moves = 0
        self.hints_used = 0
        self.is_answered = False
        self._rule = rule
        self._chaos = Chaos(setting.task, seed=setting.seed, scale=chaos_scale)
        self._num_faults = 0
        self._start = UNANSWERED if setting.task.answer else setting.start
        self._standing = self._start
        self._value = 0.0

    @property
    def is_solved(self) -> bool:
        return self._standing.is_solved

    @property
    def is_last_move(self) -> bool:
        return self.moves >= self.setting.task.step_limit

    @property
    def is_over(self) -> bool:
        return self.is_solved or self.is_answered or self.is_last_move

    def begin_move(self) -> None:
        self.moves += 1

    def take_hint(self) -> None:
        self.hints_used = min(NUM_HINTS, self.hints_used + 1)

    def strike(self) -> ChaosFault | None:
        fault = self._chaos.strike(is_last_move=self.is_last_move)
        self._num_faults += fault is not None
        return fault

    async def look(self) -> None:
        """See how the environment stands now. A question's environment may change as it likes."""
        if self.setting.task.answer is None:
            self._standing = await self.setting.standing()

    async def answer(self, reply: str) -> bool:
        """Compare with the truth as it is now. There is one try."""
        question = self.setting.task.answer
        assert question is not None
        (truth,) = await self.setting.cloud.ask([call_of(question, self.setting.variables)])
        self.is_answered = True
        self._standing = ANSWERED if is_right(question, truth, self.setting.variables, reply) else UNANSWERED
        return self.is_solved

    def settle(self) -> float:
        """The reward of this move: what the situation is worth now, less what it was worth before."""
        value = self._rule.value(self._standing, start=self._start, hints_used=self.hints_used)
        reward, self._value = value - self._value, value
        return reward

    def applause(self) -> str:
        return "\n\nThe task is solved." if self.is_solved else ""

    def facts(self) -> dict[str, Any]:
        """For the viewer."""
        task = self.setting.task
        if task.answer is None:
            names = [check.says for check in self.setting.goals]
            goals = dict(zip(names, self._standing.goals, strict=True))
            keeps = dict(zip((check.says for check in task.keeps), self._standing.keeps, strict=True))
        else:
            goals, keeps = {"the answer is right": self.is_solved}, {}
        return {
            "task_id": task.id,
            "tier": task.tier.value,
            "seed": self.setting.seed,
            "moves": self.moves,
            "hints": self.hints_used,
            "score": round(self._value, 6),
            "goals": goals,
            "keeps": keeps,
            "drift": [fault.name for fault in self.setting.faults],
            "chaos": self._num_faults,
        }
