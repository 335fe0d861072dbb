"""`RewardPool`: reward functions in processes of their own, each call with a deadline that holds whatever the function does.

A process that is late is killed and replaced: a regular expression that backtracks for a week costs its sample and nothing else.
Waiting for a free process is not the function's time. Plain functions have a process to themselves while they run. Async ones share
one; a late call there is first given up politely, and only if the process does not answer to that is it killed. Everybody who was
in it is asked again, alone: so the one that computes for ever is found, and its neighbours get their answer.
"""

import asyncio
import itertools
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rollbook.concurrency.shield import finish
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.rollout.rewards.messages import (
    Answer,
    Ask,
    FromChild,
    Give,
    Load,
    Loaded,
    LoadFailed,
    RewardCase,
    ToChild,
    encode,
    from_child,
)
from rollbook.rollout.settings import RewardRules, Score
from rollbook.rollout.workers.messages import frame, read_frame
from rollbook.telemetry.events import EventLog

GIVING_UP_S = 1.0
"""How long a process may take to confirm that an async call was given up. One that does not is not awaiting: it computes."""


class RewardPoolError(WorkerError):
    """No process for the reward functions can be had any more."""


@dataclass(slots=True, eq=False)
class _Call:
    function: str
    case: RewardCase
    score: asyncio.Future[Score]


class _Gone(Exception):
    """The process ended. The text says how."""


class _Child:
    """One process that has loaded the functions."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self.is_async: dict[str, bool] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    async def load(self, message: Load, *, within_s: float) -> None:
        self._send(message)
        try:
            async with asyncio.timeout(within_s):
                told = await self._next()
        except TimeoutError:
            raise RunError(
                f"the reward functions were not loaded within {within_s:g} s; raise rollout.rewards.start_s, or see what "
                f"importing {', '.join(message.functions.values())} does"
            ) from None
        except _Gone as error:
            raise RunError(f"a process died while it loaded the reward functions: {error}") from error
        if isinstance(told, LoadFailed):
            raise RunError(told.cause)
        assert isinstance(told, Loaded)
        self.is_async = told.is_async

    async def answers(self) -> None:
        """Hand out what comes back. Ends with the process: everybody who still waits is told how it went."""
        try:
            while True:
                told = await self._next()
                if isinstance(told, Answer) and (waiting := self._waiting.pop(told.call, None)) and not waiting.done():
                    waiting.set_result(told)
        except _Gone as error:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_Gone(str(error)))
                    waiting.exception()  # whoever asked may be gone too, and nobody is to be warned about that
            self._waiting.clear()

    def ask(self, function: str, case: RewardCase) -> tuple[int, asyncio.Future[Answer]]:
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._process.returncode is not None:
            answer.set_exception(_Gone(_ending(self._process.returncode)))
        else:
            self._waiting[number] = answer
            self._send(Ask(call=number, function=function, case=case))
        return number, answer

    def give_up(self, number: int) -> None:
        self._send(Give(call=number))

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._writer.close()

    async def _next(self) -> FromChild:
        payload = await read_frame(self._reader)
        if payload is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
            raise _Gone(_ending(self._process.returncode))
        message: FromChild = from_child.decode(payload)
        return message

    def _send(self, message: ToChild) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(encode(message)))


class RewardPool:
    """Made by `open_reward_pool`."""

    def __init__(self, rules: RewardRules, *, search_path: tuple[str, ...], log: EventLog) -> None:
        self._rules = rules
        self._load = Load(functions={f.name: f.path for f in rules.functions}, search_path=list(search_path))
        self._log = log
        self._is_async: dict[str, bool] = {}
        # Every call is that of an episode in flight, so there are never more than those times the functions.
        self._plain: asyncio.Queue[_Call] = asyncio.Queue()
        self._awaiting: asyncio.Queue[_Call] = asyncio.Queue()
        self._suspects: asyncio.Queue[_Call] = asyncio.Queue()
        self._failure: Exception | None = None
        self._pending: set[_Call] = set()
        self.kills = 0

    async def score(self, function: str, case: RewardCase) -> Score:
        """What the function says of the case. Whatever it does, this ends: at the latest some time after its deadline."""
        if self._failure is not None:
            raise RewardPoolError(f"the reward functions cannot be run any more: {self._failure}")
        call = _Call(function, case, asyncio.get_running_loop().create_future())
        self._pending.add(call)
        try:
            (self._awaiting if self._is_async[function] else self._plain).put_nowait(call)
            return await call.score
        finally:
            self._pending.discard(call)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RewardPool"]:
        """Load the functions, so that a path that leads nowhere is known at once; then keep every seat taken."""
        async with self._open_child() as scout:
            self._is_async = scout.is_async
        plain = self._rules.processes if not all(self._is_async.values()) else 0
        seats = [asyncio.create_task(self._seat(self._plain, 1), name=f"reward.plain.{i}") for i in range(plain)]
        if any(self._is_async.values()):
            seats.append(asyncio.create_task(self._seat(self._awaiting, self._rules.concurrent), name="reward.async"))
            seats.append(asyncio.create_task(self._seat(self._suspects, 1), name="reward.suspects"))
        try:
            yield self
        finally:
            for seat in seats:
                seat.cancel()
            await asyncio.gather(*seats, return_exceptions=True)

    async def _seat(self, calls: asyncio.Queue[_Call], side_by_side: int) -> None:
        """Keep one process. Takes: calls. Gives: scores. Ends: on cancellation; a process that cannot be had fails every call."""
        try:
            while True:
                if calls is self._suspects:
                    # Seldom needed: its process is not started before it is.
                    calls.put_nowait(await calls.get())
                async with self._open_child() as child, asyncio.TaskGroup() as group:
                    hands = [
                        group.create_task(
                            self._serve(child, calls, is_alone=side_by_side == 1), name=f"reward.hand.{i}"
                        )
                        for i in range(side_by_side)
                    ]
                    # A hand ends when the process is done for; then so is the work of the others.
                    await asyncio.wait(hands, return_when=asyncio.FIRST_COMPLETED)
                    await child.kill()
                    for hand in hands:
                        hand.cancel()
        except Exception as error:
            self._failure = error
            self._log.error("rollout.rewards_failed", cause=str(error))
            for call in self._pending:
                if not call.score.done():
                    call.score.set_exception(RewardPoolError(f"the reward functions cannot be run any more: {error}"))

    async def _serve(self, child: _Child, calls: asyncio.Queue[_Call], *, is_alone: bool) -> None:
        while True:
            call = await calls.get()
            if call.score.done():
                continue  # nobody waits for it any more
            try:
                can_go_on = await (self._alone(child, call) if is_alone else self._beside(child, call))
            except asyncio.CancelledError:
                self._suspects.put_nowait(call)
                raise
            if not can_go_on:
                return

    async def _alone(self, child: _Child, call: _Call) -> bool:
        """Carry out a call that has the process to itself. True when the process can go on."""
        _, answer = child.ask(call.function, call.case)
        done, _ = await asyncio.wait({answer}, timeout=self._rules.timeout_s)
        if not done:
            self._killed(child, call)
            self._settle(call, Score(cause=f"{self._late}, and its process was killed", seconds=self._rules.timeout_s))
            return False
        return self._answered(call, answer)

    async def _beside(self, child: _Child, call: _Call) -> bool:
        """Carry out a call beside others.

        Where the process itself fails, any of them may be to blame: each is asked again, alone.
        """
        number, answer = child.ask(call.function, call.case)
        done, _ = await asyncio.wait({answer}, timeout=self._rules.timeout_s)
        if done and answer.exception() is None:
            return self._answered(call, answer)
        if not done:
            child.give_up(number)
            done, _ = await asyncio.wait({answer}, timeout=GIVING_UP_S)
            if done and answer.exception() is None:
                self._settle(call, Score(cause=self._late, seconds=self._rules.timeout_s))
                return True
            self._killed(child, call)
        self._suspects.put_nowait(call)
        return False

    def _answered(self, call: _Call, answer: asyncio.Future[Answer]) -> bool:
        if (gone := answer.exception()) is not None:
            self._settle(call, Score(cause=f"its process {gone}"))
            return False
        told = answer.result()
        self._settle(call, Score(value=told.value, cause=told.cause, seconds=told.seconds))
        return True

    def _killed(self, child: _Child, call: _Call) -> None:
        self.kills += 1
        self._log.warning("rollout.reward_killed", function=call.function, after_s=self._rules.timeout_s, pid=child.pid)

    def _settle(self, call: _Call, score: Score) -> None:
        if not call.score.done():
            call.score.set_result(score)

    @property
    def _late(self) -> str:
        return f"did not end within {self._rules.timeout_s:g} s (rollout.rewards.timeout_s)"

    @asynccontextmanager
    async def _open_child(self) -> AsyncIterator[_Child]:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollbook.rollout.rewards.main",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        child = _Child(process, reader, writer)
        answers: asyncio.Task[None] | None = None
        try:
            await child.load(self._load, within_s=self._rules.start_s)
            answers = asyncio.create_task(child.answers(), name=f"reward.answers.{child.pid}")
            yield child
        finally:
            await finish(child.kill(), within_s=5.0, name=f"end of reward process {child.pid}")
            if answers is not None:
                answers.cancel()


@asynccontextmanager
async def open_reward_pool(
    rules: RewardRules, *, search_path: tuple[str, ...], log: EventLog
) -> AsyncIterator[RewardPool]:
    """Raises `RunError` when a function cannot be found."""
    async with RewardPool(rules, search_path=search_path, log=log).serving() as pool:
        yield pool


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "closed its connection"
    return f"was killed by signal {-returncode}" if returncode < 0 else f"exited with status {returncode}"
