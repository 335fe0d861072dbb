"""`RewardPool`: runs reward functions in child processes, each call with a timeout that holds in every case.

A process that exceeds the timeout is killed and replaced: a regular expression that backtracks without end costs only its own
sample. The time that a call waits for a free process does not count. A plain function has a process to itself. Async functions
share one process: a late call is cancelled first, and only if the process does not respond is it killed. Then each call that ran in
it is repeated alone, which finds the one that blocks and gives the others their result.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from rollbook.concurrency.child_process.process import ChildEndedError, ChildProcess, ChildSpec
from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import RunError, WorkerError
from rollbook.rollout.rewards.messages import (
    Call,
    CallResult,
    CancelCall,
    FromChild,
    Load,
    Loaded,
    LoadFailed,
    RewardCase,
    encode,
    from_child,
)
from rollbook.rollout.settings import RewardRules, Score
from rollbook.telemetry.events import EventLog

CANCEL_S = 1.0
"""How long a process may take to confirm a cancelled call. One that does not confirm is blocked by a computation."""
LOAD_ATTEMPTS = 3
"""A process that dies while it loads was killed from outside, or a function ends it: then every attempt fails."""
KILL_S = 10.0


class RewardPoolError(WorkerError):
    """Reward processes can no longer be started."""


@dataclass(slots=True, eq=False)
class _Request:
    function: str
    cases: tuple[RewardCase, ...]
    is_group: bool
    score: asyncio.Future[Score]
    was_returned: bool = False
    """The process was found dead before the call. It is returned to its queue once, so that it always ends."""


class _RewardProcess:
    """One process that has loaded the functions."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._results: dict[int, asyncio.Future[CallResult]] = {}
        self._numbers = itertools.count()
        self.is_async: dict[str, bool] = {}

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    async def load(self, message: Load, *, within_s: float) -> None:
        """Raises `RunError` when a function cannot be loaded, and `ChildEndedError` when the process dies."""
        self._child.send(encode(message))
        try:
            async with asyncio.timeout(within_s):
                reply = await self._receive()
        except TimeoutError:
            raise RunError(
                f"the reward functions were not loaded within {within_s:g} s; raise rollout.rewards.start_s, or check what "
                f"importing {', '.join(message.functions.values())} does"
            ) from None
        if isinstance(reply, LoadFailed):
            raise RunError(reply.cause)
        assert isinstance(reply, Loaded)
        self.is_async = reply.is_async

    async def receive_results(self) -> None:
        """Resolve the futures of `call`. Ends with the process; calls without a result then fail with `ChildEndedError`."""
        try:
            while True:
                message = await self._receive()
                if isinstance(message, CallResult):
                    result = self._results.pop(message.number, None)
                    if result is not None and not result.done():
                        result.set_result(message)
        except ChildEndedError as error:
            for result in self._results.values():
                if not result.done():
                    _fail(result, str(error))
            self._results.clear()

    def call(self, request: _Request) -> tuple[int, asyncio.Future[CallResult]]:
        number = next(self._numbers)
        result: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        if self._child.is_alive:
            self._results[number] = result
            call = Call(number=number, function=request.function, cases=request.cases, is_group=request.is_group)
            self._child.send(encode(call))
        else:
            _fail(result, self._child.exit_reason)
        return number, result

    def cancel(self, number: int) -> None:
        self._child.send(encode(CancelCall(number=number)))

    async def kill(self) -> None:
        await self._child.kill()

    async def _receive(self) -> FromChild:
        message: FromChild = from_child.decode(await self._child.receive())
        return message


def _fail(result: asyncio.Future[CallResult], cause: str) -> None:
    result.set_exception(ChildEndedError(cause))
    result.exception()  # marks it as retrieved: its caller may be gone


class RewardPool:
    """Made by `open_reward_pool`."""

    def __init__(self, rules: RewardRules, *, search_path: tuple[str, ...], log: EventLog) -> None:
        self._rules = rules
        self._load = Load(functions={f.name: f.path for f in rules.functions if f.path}, search_path=list(search_path))
        self._log = log
        self._is_async: dict[str, bool] = {}
        # Unbounded, and never longer than the episodes in flight times the functions.
        self._plain_requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._async_requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._repeated_requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._failure: Exception | None = None
        self._pending: set[_Request] = set()
        self.kills = 0

    async def score(self, function: str, case: RewardCase) -> Score:
        """The function's score of the case. Always returns or raises, soon after the timeout at the latest."""
        return await self._request(function, (case,), is_group=False)

    async def score_group(self, function: str, cases: Sequence[RewardCase]) -> Score:
        """The score of a function of groups: `values`, or a cause."""
        return await self._request(function, tuple(cases), is_group=True)

    async def _request(self, function: str, cases: tuple[RewardCase, ...], *, is_group: bool) -> Score:
        if self._failure is not None:
            raise RewardPoolError(f"the reward functions can no longer be run: {self._failure}")
        request = _Request(function, cases, is_group, asyncio.get_running_loop().create_future())
        self._pending.add(request)
        try:
            (self._async_requests if self._is_async[function] else self._plain_requests).put_nowait(request)
            return await request.score
        finally:
            self._pending.discard(request)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RewardPool"]:
        """Load the functions once, to report a wrong path at once; then keep the processes running."""
        if not self._load.functions:
            yield self
            return
        async with self._open_process() as first:
            self._is_async = first.is_async
        num_plain = self._rules.processes if not all(self._is_async.values()) else 0
        keepers = [
            asyncio.create_task(self._keep_process(self._plain_requests, 1), name=f"reward.plain.{i}")
            for i in range(num_plain)
        ]
        if any(self._is_async.values()):
            shared = self._keep_process(self._async_requests, self._rules.concurrent)
            keepers.append(asyncio.create_task(shared, name="reward.async"))
            keepers.append(asyncio.create_task(self._keep_process(self._repeated_requests, 1), name="reward.repeated"))
        try:
            yield self
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep_process(self, requests: asyncio.Queue[_Request], concurrency: int) -> None:
        """Run one process, and replace it when it fails.

        Takes:  requests, from `requests`.
        Gives:  scores.
        Ends:   on cancellation. A process that cannot be started fails every request.
        """
        try:
            while True:
                if requests is self._repeated_requests:
                    # Rarely needed: start this process only for a request.
                    requests.put_nowait(await requests.get())
                async with self._open_process() as process, asyncio.TaskGroup() as group:
                    servers = [
                        group.create_task(
                            self._serve(process, requests, is_alone=concurrency == 1), name=f"reward.serve.{i}"
                        )
                        for i in range(concurrency)
                    ]
                    # A server ends when the process has failed; the calls of the others are lost with it.
                    await asyncio.wait(servers, return_when=asyncio.FIRST_COMPLETED)
                    await process.kill()
                    for server in servers:
                        server.cancel()
        except Exception as error:
            self._failure = error
            self._log.error("rollout.rewards_failed", cause=str(error))
            for request in self._pending:
                if not request.score.done():
                    request.score.set_exception(RewardPoolError(f"the reward functions can no longer be run: {error}"))

    async def _serve(self, process: _RewardProcess, requests: asyncio.Queue[_Request], *, is_alone: bool) -> None:
        while True:
            request = await requests.get()
            if request.score.done():
                continue  # cancelled
            if not process.is_alive and not request.was_returned:
                # It died while it was idle, which says nothing about this call: the next process makes it.
                request.was_returned = True
                requests.put_nowait(request)
                return
            try:
                is_usable = await (
                    self._score_alone(process, request) if is_alone else self._score_shared(process, request)
                )
            except asyncio.CancelledError:
                self._repeated_requests.put_nowait(request)
                raise
            if not is_usable:
                return

    async def _score_alone(self, process: _RewardProcess, request: _Request) -> bool:
        """Make a call that has the process to itself. False when the process is no longer usable."""
        _, result = process.call(request)
        done, _ = await asyncio.wait({result}, timeout=self._rules.timeout_s)
        if not done:
            self._count_kill(process, request)
            cause = f"{self._late}, and its process was killed"
            self._settle(request, Score(cause=cause, seconds=self._rules.timeout_s))
            return False
        return self._take_result(request, result)

    async def _score_shared(self, process: _RewardProcess, request: _Request) -> bool:
        """Make a call concurrently with others. False when the process is no longer usable.

        If the process itself fails, any of its calls may be the cause: each is repeated alone.
        """
        number, result = process.call(request)
        done, _ = await asyncio.wait({result}, timeout=self._rules.timeout_s)
        if done and result.exception() is None:
            return self._take_result(request, result)
        if not done:
            process.cancel(number)
            done, _ = await asyncio.wait({result}, timeout=CANCEL_S)
            if done and result.exception() is None:
                self._settle(request, Score(cause=self._late, seconds=self._rules.timeout_s))
                return True
            self._count_kill(process, request)
        self._repeated_requests.put_nowait(request)
        return False

    def _take_result(self, request: _Request, result: asyncio.Future[CallResult]) -> bool:
        if (ended := result.exception()) is not None:
            self._settle(request, Score(cause=f"its process {ended}"))
            return False
        found = result.result()
        self._settle(
            request,
            Score(value=found.value, cause=found.cause, seconds=found.seconds, turns=found.turns, values=found.values),
        )
        return True

    def _count_kill(self, process: _RewardProcess, request: _Request) -> None:
        self.kills += 1
        self._log.warning(
            "rollout.reward_killed", function=request.function, after_s=self._rules.timeout_s, pid=process.pid
        )

    def _settle(self, request: _Request, score: Score) -> None:
        if not request.score.done():
            request.score.set_result(score)

    @property
    def _late(self) -> str:
        return f"did not end within {self._rules.timeout_s:g} s (rollout.rewards.timeout_s)"

    @asynccontextmanager
    async def _open_process(self) -> AsyncIterator[_RewardProcess]:
        async with AsyncExitStack() as stack:
            for attempt in range(1, LOAD_ATTEMPTS + 1):
                process = _RewardProcess(await ChildProcess.start(ChildSpec(module="rollbook.rollout.rewards.main")))
                stack.push_async_callback(
                    finish, process.kill(), within_s=KILL_S, name=f"end of reward process {process.pid}"
                )
                try:
                    await process.load(self._load, within_s=self._rules.start_s)
                    break
                except ChildEndedError as error:
                    cause = f"a process died while it loaded the reward functions: it {error}"
                    if attempt == LOAD_ATTEMPTS:
                        raise RunError(f"{cause} ({attempt} attempts)") from error
                    self._log.warning("rollout.reward_process_died", cause=cause, attempt=attempt)
            receiving = asyncio.create_task(process.receive_results(), name=f"reward.results.{process.pid}")
            stack.callback(receiving.cancel)
            yield process


@asynccontextmanager
async def open_reward_pool(
    rules: RewardRules, *, search_path: tuple[str, ...], log: EventLog
) -> AsyncIterator[RewardPool]:
    """Raises `RunError` when a function cannot be found."""
    async with RewardPool(rules, search_path=search_path, log=log).running() as pool:
        yield pool
