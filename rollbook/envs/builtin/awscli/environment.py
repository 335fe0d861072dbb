"""The AWS environment: the agent has a terminal with `aws`, a goal, and so many moves.

A move is one line: `aws …`, `hint`, or `answer …` where the task asks a question. After a move that may have changed something the
environment is looked at, and the reward is the change of its worth (`grading.py`). The episode ends when the goal is reached, an
answer
was given, or the moves are used up. A failed set-up or a dead cloud ends it with an error that nobody scores.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.environment import Observation
from rollbook.contracts.errors import EpisodeError
from rollbook.contracts.ports import Environment
from rollbook.envs.builtin.awscli.backend import AccountCloud, Backend, SimulatedCloud
from rollbook.envs.builtin.awscli.chaos import FaultKind
from rollbook.envs.builtin.awscli.commands import Command, Refusal, Verb, understand
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.episode import AwsEpisode
from rollbook.envs.builtin.awscli.grading import GradingRule
from rollbook.envs.builtin.awscli.hints import hint_text
from rollbook.envs.builtin.awscli.pool import MiniStackPool, open_ministack_pool
from rollbook.envs.builtin.awscli.setting import prepare
from rollbook.envs.builtin.awscli.task_bank import AwsTask, parse_task, task_bank
from rollbook.envs.builtin.awscli.worker import CommandResult
from rollbook.envs.environment import EnvironmentAdapter
from rollbook.envs.pools.environment_pool import EnvironmentPool, EnvironmentsExhaustedError, PoolHealth
from rollbook.envs.sandboxes.pool import PoolExhaustedError
from rollbook.envs.sandboxes.sandbox import SandboxDiedError
from rollbook.telemetry.events import EventLog

RULES = (
    "You operate AWS through its command line. Reply with one line that begins with `aws`; there is no shell, so no pipes, no "
    "variables and no files outside the working directory. The line `hint` buys a hint."
)
ANSWER_RULE = "When you know the answer, reply with the line `answer VALUE`. You can answer once."
GiveBack = Callable[[bool], None]


class AwsCliEnvironment:
    """`reset` with a task, `step` with what the agent said. Without a lent cloud it starts one of its own at the first reset."""

    def __init__(self, *, cloud: Backend | None = None, give_back: GiveBack | None = None, **args: Any) -> None:
        self._config = AwsCliConfig.read(args, environ=os.environ)
        self._cloud = cloud
        self._give_back = give_back
        self._is_own = cloud is None
        self._is_suspect = False
        self._is_used = False
        self._episode: AwsEpisode | None = None

    @classmethod
    @asynccontextmanager
    async def open_pool(
        cls, *, size: int | None, log: EventLog, args: Mapping[str, Any]
    ) -> AsyncIterator[EnvironmentPool]:
        """Satisfies `BringsItsPool`: environments that each hold one slot of a `MiniStackPool` while they are open."""
        config = AwsCliConfig.read(args, environ=os.environ, size=size)
        if config.backend == "aws":
            account = await AccountCloud.start(config)
            try:
                yield AwsAccountPool(account, args)
            finally:
                await account.remove()
            return
        async with open_ministack_pool(config, log=log) as pool:
            yield AwsCliPool(pool, args)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Row: `id` of the bank (or a whole task), and optionally `seed` and `chaos_scale`."""
        cloud = await self._clean_cloud()
        description = find_task(task)
        seed = int(task.get("seed", self._config.seed))
        try:
            setting = await prepare(description, cloud, seed=seed)
        except SandboxDiedError:
            self._is_suspect = True
            raise
        self._episode = AwsEpisode(
            setting,
            rule=GradingRule(partial=self._config.partial, hint_price=self._config.hint_price),
            chaos_scale=float(task.get("chaos_scale", self._config.chaos)),
        )
        text = f"{RULES}\n{ANSWER_RULE if description.answer else ''}\n\nTask: {setting.goal}\nMoves: {description.step_limit}"
        return Observation(text=text.replace("\n\n\n", "\n\n"), facts=self._episode.facts())

    async def step(self, action: str) -> Observation:
        episode = self._running_episode()
        episode.begin_move()
        try:
            move = understand(action, may_answer=episode.setting.task.answer is not None)
            said = await self._play(episode, move)
        except SandboxDiedError:
            self._is_suspect = True
            raise
        reward = episode.settle()
        if episode.is_over and not episode.is_solved:
            said += f"\n\nThe episode is over after {episode.moves} moves."
        return Observation(
            text=said,
            reward=reward,
            done=episode.is_over,
            solved=episode.is_solved if episode.is_over else None,
            facts=episode.facts(),
        )

    async def close(self) -> None:
        self._episode = None
        cloud, self._cloud = self._cloud, None
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self._is_suspect)
        elif cloud is not None and self._is_own:
            await cloud.remove()

    async def _play(self, episode: AwsEpisode, move: Command | Refusal) -> str:
        setting = episode.setting
        if isinstance(move, Refusal):
            return f"error: {move.text}"
        if move.verb is Verb.HINT:
            text = hint_text(setting.hints, episode.hints_used, self._config.hint_price)
            episode.take_hint()
            return text
        if move.verb is Verb.ANSWER:
            return "correct" if await episode.answer(" ".join(move.argv)) else "that is not the answer"
        fault = None if move.is_read_only else episode.strike()
        if fault is not None and fault.kind is FaultKind.REFUSED:
            return f"{fault.text}\n(exit code 255)"
        result = await setting.cloud.run(move.argv)
        if fault is not None and fault.step is not None:
            await setting.disturb(fault.step)
        if not move.is_read_only or episode.is_last_move:
            await episode.look()
        return shown(result, skipped=move.skipped, max_chars=self._config.max_output_chars) + episode.applause()

    async def _clean_cloud(self) -> Backend:
        if self._cloud is None:
            if not self._is_own:
                raise EpisodeError("env aws: reset after close; open a new environment")
            config = self._config
            self._cloud = (
                await AccountCloud.start(config)
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


def find_task(row: Mapping[str, Any]) -> AwsTask:
    """The bank's task with the row's id, or the whole task that the row brings along."""
    if "goal" in row:
        return parse_task(
            {key: value for key, value in row.items() if key not in {"seed", "split", "chaos_scale"}}, where="row"
        )
    task = task_bank().get(str(row.get("id")))
    if task is None:
        raise ValueError(
            f"there is no task {row.get('id')!r} in the bank of {len(task_bank())}; rows need the id of one, or a goal"
        )
    return task


def shown(result: CommandResult, *, skipped: int, max_chars: int) -> str:
    """What the agent reads: output, errors, the exit code when it is not 0, and what was left out."""
    text = "\n".join(part for part in (result.stdout.strip(), result.stderr.strip()) if part) or "(no output)"
    cut = max(0, len(text) - max_chars)
    remarks = []
    if cut or result.dropped_bytes:
        remarks.append(f"(output cut after {max_chars} characters; ask for less, for example with --query)")
    if result.rc != 0:
        remarks.append(f"(exit code {result.rc})")
    if skipped:
        remarks.append(f"(only the first command was run; {skipped} more were not: one command for each move)")
    return "\n".join([text[:max_chars], *remarks])


class AwsCliPool:
    """Environments over a pool of simulators. Satisfies `EnvironmentPool`."""

    def __init__(self, pool: MiniStackPool, args: Mapping[str, Any]) -> None:
        self._pool = pool
        self._args = dict(args)

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    @property
    def pool(self) -> MiniStackPool:
        return self._pool

    async def acquire(self, deadline: Deadline) -> Environment:
        try:
            lease = await self._pool.acquire(deadline)
        except PoolExhaustedError as error:
            raise EnvironmentsExhaustedError(str(error)) from error
        env = AwsCliEnvironment(
            cloud=lease.sandbox, give_back=lambda is_suspect: lease.release(is_suspect=is_suspect), **self._args
        )
        return EnvironmentAdapter(env, name="aws")

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=self._pool.capacity, busy=self._pool.lent, replaced=self._pool.replaced)


class AwsAccountPool:
    """The one real account, one session at a time. Satisfies `EnvironmentPool`."""

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
        return EnvironmentAdapter(
            AwsCliEnvironment(cloud=self._account, give_back=self._given_back, **self._args), name="aws"
        )

    def health(self) -> PoolHealth:
        return PoolHealth(capacity=1, busy=int(self._is_busy))

    def _given_back(self, is_suspect: bool) -> None:
        self._is_busy = False
