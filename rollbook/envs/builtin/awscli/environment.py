"""The AWS environment: the agent has a terminal with `aws`, a goal, and a limited number of moves.

A move is one line: `aws …`, `hint`, or `answer …` if the task asks a question. After a move that may have changed something, the
checks run, and the reward is the change of the state's value (`tasks/checks.py`). The episode ends when the goal is reached, an
answer was given, or no moves are left. A failed set-up or a dead cloud raises an error, and the episode is not scored.
"""

import os
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation
from rollbook.envs.builtin.awscli.cloud.account import AccountCloud
from rollbook.envs.builtin.awscli.cloud.backend import Backend, CloudPool, SimulatedCloud, open_cloud_pool
from rollbook.envs.builtin.awscli.cloud.worker import CommandResult
from rollbook.envs.builtin.awscli.commands import Command, CommandVerb, Refusal, parse_move
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.tasks.checks import CheckResults, GradingRule, fill, hint_text, is_right
from rollbook.envs.builtin.awscli.tasks.setup import Chaos, ChaosFault, FaultKind, PreparedTask, chosen_variant, prepare
from rollbook.envs.builtin.awscli.tasks.task_bank import NUM_HINTS, AwsTask, TaskTier, aws_tasks, find_task, task_bank
from rollbook.envs.environment import EnvironmentAdapter, EnvironmentPool, EnvironmentsExhaustedError, PoolHealth
from rollbook.envs.sandboxes.pool import PoolExhaustedError
from rollbook.sandbox.sandbox import SandboxDiedError
from rollbook.telemetry.events import EventLog

# A question has one goal: the right answer.
UNANSWERED = CheckResults(goals=(False,))
ANSWERED = CheckResults(goals=(True,))


class AwsEpisode:
    """One episode: counts moves and hints, and computes rewards; `AwsCliEnvironment` runs the commands."""

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


RULES = (
    "You operate AWS through its command line. Reply with one line that begins with `aws`; there is no shell, so no pipes, no "
    "variables and no files outside the working directory. The line `hint` buys a hint."
)
ANSWER_RULE = "When you know the answer, reply with the line `answer VALUE`. You can answer once."


class AwsCliEnvironment:
    """A terminal with the AWS command line, on a simulated cloud.

    `reset` with a task, `step` with the agent's reply. Without a `cloud` it starts its own at the first reset.

    `release` returns a lent cloud; its argument says whether the cloud may be damaged.
    """

    def __init__(
        self, *, cloud: Backend | None = None, release: Callable[[bool], None] | None = None, **args: Any
    ) -> None:
        self._config = AwsCliConfig.read(args, environ=os.environ)
        self._cloud = cloud
        self._release = release
        self._is_own = cloud is None
        self._is_suspect = False
        self._is_used = False
        self._episode: AwsEpisode | None = None

    @classmethod
    @asynccontextmanager
    async def open_pool(
        cls, *, size: int | None, log: EventLog, args: Mapping[str, Any]
    ) -> AsyncIterator[EnvironmentPool]:
        """Satisfies `OpensItsPool`: each environment holds one slot of a `CloudPool` while it is open."""
        config = AwsCliConfig.read(args, environ=os.environ, size=size)
        if config.backend == "aws":
            account = await AccountCloud.start(config, log=log)
            try:
                yield AwsAccountPool(account, args)
            finally:
                await account.remove()
            return
        async with open_cloud_pool(config, log=log) as pool:
            yield AwsCliPool(pool, args)

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground: the bank, easiest tier first. Names that only the set-up knows are left out of the goal."""

        def goal(task: AwsTask) -> str:
            variant = chosen_variant(task, AwsCliConfig().seed)
            return re.sub(r"\$\{(\w+)\}", lambda name: str(variant.get(name[1], "…")), task.goal)

        order = list(TaskTier)
        rows = ({**row, "description": goal(task_bank()[row["id"]])} for row in aws_tasks())
        return sorted(rows, key=lambda row: order.index(TaskTier(row["tier"])))

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """A row has the `id` of a task of the bank (or is a whole task), and optionally `seed` and `chaos_scale`."""
        cloud = await self._clean_cloud()
        aws_task = find_task(task)
        try:
            prepared = await prepare(aws_task, cloud, seed=int(task.get("seed", self._config.seed)))
        except SandboxDiedError:
            self._is_suspect = True
            raise
        self._episode = AwsEpisode(
            prepared,
            rule=GradingRule(partial=self._config.partial, hint_price=self._config.hint_price),
            chaos_scale=float(task.get("chaos_scale", self._config.chaos)),
        )
        rules = f"{RULES}\n{ANSWER_RULE}" if aws_task.answer else RULES
        goal = str(fill(aws_task.goal, prepared.variables)).strip()
        text = f"{rules}\n\nTask: {goal}\nMoves: {aws_task.step_limit}"
        return Observation(text=text, facts=self._episode.facts())

    async def step(self, action: str) -> Observation:
        episode = self._running_episode()
        episode.moves += 1
        try:
            move = parse_move(action, may_answer=episode.prepared.task.answer is not None)
            text = await self._play(episode, move)
        except SandboxDiedError:
            self._is_suspect = True
            raise
        reward = episode.take_reward()
        if episode.is_over and not episode.is_solved:
            text += f"\n\nThe episode is over after {episode.moves} moves."
        return Observation(
            text=text,
            reward=reward,
            done=episode.is_over,
            solved=episode.is_solved if episode.is_over else None,
            facts=episode.facts(),
        )

    async def close(self) -> None:
        self._episode = None
        cloud, self._cloud = self._cloud, None
        release, self._release = self._release, None
        if release is not None:
            release(self._is_suspect)
        elif cloud is not None and self._is_own:
            await cloud.remove()

    async def _play(self, episode: AwsEpisode, move: Command | Refusal) -> str:
        prepared = episode.prepared
        if isinstance(move, Refusal):
            return f"error: {move.text}"
        if move.verb is CommandVerb.HINT:
            hints = [fill(hint, prepared.variables) for hint in prepared.task.hints]
            text = hint_text(hints, episode.hints_used, self._config.hint_price)
            episode.take_hint()
            return text
        if move.verb is CommandVerb.ANSWER:
            return "correct" if episode.answer(" ".join(move.argv)) else "that is not the answer"
        fault = None if move.is_read_only else episode.draw_fault()
        if fault is not None and fault.kind is FaultKind.REFUSED:
            return f"{fault.text}\n(exit code 255)"
        result = await prepared.cloud.run(move.argv)
        if fault is not None and fault.step is not None:
            # The command may fail: the change that it undoes may not exist yet.
            await prepared.cloud.run(shlex.split(fill(fault.step.run, prepared.variables))[1:])
        if not move.is_read_only or episode.is_last_move:
            await episode.update_results()
        text = command_output(result, skipped=move.skipped, max_chars=self._config.max_output_chars)
        return f"{text}\n\nThe task is solved." if episode.is_solved else text

    async def _clean_cloud(self) -> Backend:
        if self._cloud is None:
            if not self._is_own:
                raise EpisodeError("env aws: reset was called after close; open a new environment")
            config = self._config
            self._cloud = (
                await AccountCloud.start(config, log=EventLog("env"))
                if config.backend == "aws"
                else await SimulatedCloud.start(config, port=0)
            )
        elif self._is_used:
            await self._cloud.clean()
        self._is_used = True
        return self._cloud

    def _running_episode(self) -> AwsEpisode:
        if self._episode is None:
            raise RuntimeError("step before reset: there is no task yet")
        if self._episode.is_over:
            raise RuntimeError(f"step after the end: the episode was over after {self._episode.moves} moves")
        return self._episode


def command_output(result: CommandResult, *, skipped: int, max_chars: int) -> str:
    """The agent's view of a command: output, errors, a non-zero exit code, and a remark if something was left out."""
    text = "\n".join(part for part in (result.stdout.strip(), result.stderr.strip()) if part) or "(no output)"
    remarks = []
    if len(text) > max_chars or result.dropped_bytes:
        remarks.append(f"(output cut after {max_chars} characters; ask for less, for example with --query)")
    if result.rc != 0:
        remarks.append(f"(exit code {result.rc})")
    if skipped:
        remarks.append(f"(only the first command was run; {skipped} more were not: one command for each move)")
    return "\n".join([text[:max_chars], *remarks])


class AwsCliPool:
    """Environments over a pool of simulators. Satisfies `EnvironmentPool`."""

    def __init__(self, simulators: CloudPool, args: Mapping[str, Any]) -> None:
        self.simulators = simulators
        self._args = dict(args)

    @property
    def capacity(self) -> int:
        return self.simulators.capacity

    async def acquire(self, deadline: Deadline) -> Environment:
        try:
            lease = await self.simulators.acquire(deadline)
        except PoolExhaustedError as error:
            raise EnvironmentsExhaustedError(str(error)) from error
        env = AwsCliEnvironment(
            cloud=lease.sandbox, release=lambda is_suspect: lease.release(is_suspect=is_suspect), **self._args
        )
        return EnvironmentAdapter(env, name="aws")

    def health(self) -> PoolHealth:
        pool = self.simulators
        return PoolHealth(capacity=pool.capacity, busy=pool.leased, replaced=pool.replaced)


class AwsAccountPool:
    """One real account, one session at a time. It is cleaned before the next session. Satisfies `EnvironmentPool`."""

    def __init__(self, account: AccountCloud, args: Mapping[str, Any]) -> None:
        self._account = account
        self._args = dict(args)
        self._is_busy = False

    @property
    def capacity(self) -> int:
        return 1

    async def acquire(self, deadline: Deadline) -> Environment:
        if self._is_busy:
            raise EnvironmentsExhaustedError(
                f"{self._account.name} is in use; a real account serves one session at a time"
            )
        deadline.require()
        self._is_busy = True
        try:
            await self._account.clean()
        except BaseException:
            self._is_busy = False
            raise
        return EnvironmentAdapter(
            AwsCliEnvironment(cloud=self._account, release=self._return_account, **self._args), name="aws"
        )

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=1, busy=int(self._is_busy))

    def _return_account(self, is_suspect: bool) -> None:
        self._is_busy = False
