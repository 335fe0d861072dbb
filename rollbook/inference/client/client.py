"""Asks the policy for completions; satisfies `ports.Policy`. One server or a fleet of them.

One deadline for a request, one bounded retry inside it; every try goes to the replica that suits best by then. Short requests that
are asked at the same time with the same settings travel in one HTTP request: an HTTP exchange costs more than a token of a small
model does. At most a few bundles are under way; what is asked meanwhile forms the next ones, so bundles grow with the load and a
lone request is never held back.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import EpisodeError, RollbookError, TransientError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.client.fleet import Fleet, open_fleet
from rollbook.inference.client.replica_choice import SPREAD, prompt_session
from rollbook.inference.client.server_protocol import Dialect, OwnDialect, Question
from rollbook.inference.connection import ReplicaBusyError
from rollbook.telemetry.events import EventLog

BUNDLE_MAX_TOKENS = 8
"""Longer requests travel alone: in a bundle, the first to finish waits for the last."""
BUNDLES_UNDER_WAY = 4
"""To each replica: enough that its engine always has the next bundle at hand; more would only make them smaller."""

Settings = tuple[SamplingParams, int]
"""What the asks of one bundle share: how they sample, and the replica they belong to."""


@dataclass(slots=True, eq=False)
class _Ask:
    question: Question
    session: str | None
    deadline: Deadline
    answer: asyncio.Future[Completion]


@dataclass(slots=True, eq=False)
class _Bundle:
    asks: list[_Ask]
    task: asyncio.Task[None] | None = None
    waiting: int = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = len(self.asks)

    def one_less(self, _answer: asyncio.Future[Completion]) -> None:
        """When nobody waits any more, neither does the server."""
        self.waiting -= 1
        if self.waiting == 0 and self.task is not None:
            self.task.cancel()


class PolicyClient:
    """Made by `open_policy_client`."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        request_s: float,
        log: EventLog | None = None,
        session: Callable[[], str | None] | None = None,
    ) -> None:
        self._fleet = fleet
        self._request_s = request_s
        self._log = log
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._asked: dict[Settings, list[_Ask]] = {}
        self._is_flush_due = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._most_under_way = BUNDLES_UNDER_WAY * len(fleet.replicas)
        self._last_trouble: str | None = None

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
    ) -> Completion:
        """Raises `TransientError` when the deadline is over, `EpisodeError` when this prompt can never be answered."""
        budget_s = self._request_s if timeout_s is None else timeout_s
        prompt = prompt_ids if type(prompt_ids) is list else list(map(int, prompt_ids))
        ask = _Ask(
            question=Question(prompt=prompt, sampling=sampling, min_publication=min_publication),
            session=self._session_of(prompt),
            deadline=Deadline(budget_s, "policy request"),
            answer=self._loop.create_future(),
        )
        try:
            async with asyncio.timeout(budget_s):
                if sampling.max_tokens > BUNDLE_MAX_TOKENS or self._fleet.dialect.bundle_size == 1:
                    return (await self._exchange([ask]))[0]
                self._enqueue(ask)
                return await ask.answer
        except TimeoutError as error:
            trouble = f"; last trouble: {self._last_trouble}" if self._last_trouble else ""
            raise TransientError(
                f"policy request to {self._fleet.urls} was not answered within {budget_s:g} s{trouble}"
            ) from error

    def _session_of(self, prompt: list[int]) -> str | None:
        if len(self._fleet.replicas) == 1:
            return None
        named = None if self._session is None else self._session()
        return prompt_session(prompt) if named is None else named

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for asks in self._asked.values():
            for ask in asks:
                ask.answer.cancel()
        self._asked.clear()

    def _enqueue(self, ask: _Ask) -> None:
        # Requests that differ in their seed only may share a bundle.
        sampling = ask.question.sampling
        shared = sampling if sampling.seed is None else replace(sampling, seed=None)
        self._asked.setdefault((shared, self._fleet.home(ask.session)), []).append(ask)
        if not self._is_flush_due:
            self._is_flush_due = True
            # At the end of this turn of the loop: whoever else asks in it comes along.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        size = self._fleet.dialect.bundle_size
        while self._asked and len(self._under_way) < self._most_under_way:
            settings = next(iter(self._asked))
            asks = self._asked.pop(settings)
            if len(asks) > size:
                self._asked[settings] = asks[size:]
            self._send([ask for ask in asks[:size] if not ask.answer.done()])

    def _send(self, asks: list[_Ask]) -> None:
        if not asks:
            return
        bundle = _Bundle(asks)
        bundle.task = self._loop.create_task(self._carry(asks), name="policy.bundle")
        for ask in asks:
            ask.answer.add_done_callback(bundle.one_less)
        self._under_way.add(bundle.task)
        bundle.task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._flush()

    async def _carry(self, asks: list[_Ask]) -> None:
        """Exchange a bundle and hand out the answers. Never raises: each asker gets its own outcome."""
        try:
            completions = await self._exchange(asks)
        except EpisodeError as error:
            if len(asks) == 1:
                _fail(asks, error)
                return
            # One of them is at fault, and the server does not say whose neighbours were fine.
            for ask in asks:
                if not ask.answer.done():
                    await self._carry([ask])
        except RollbookError as error:
            _fail(asks, error)
        else:
            for ask, completion in zip(asks, completions, strict=True):
                if not ask.answer.done():
                    ask.answer.set_result(completion)

    async def _exchange(self, asks: list[_Ask]) -> list[Completion]:
        """The one retry loop. A try that failed is not repeated at the same replica while another one is left."""
        failed: set[int] = set()
        session = asks[0].session
        questions = [ask.question for ask in asks]
        newest = max(question.min_publication for question in questions)

        async def attempt() -> list[Completion]:
            if len(failed) == len(self._fleet.replicas):
                failed.clear()
            at = self._fleet.choose(session=session, min_publication=newest, avoid=failed)
            try:
                with self._fleet.asking(at) as connection:
                    return await self._fleet.dialect.ask(connection, questions)
            except TransientError:
                failed.add(at)
                raise

        latest = max((ask.deadline for ask in asks), key=Deadline.remaining_s)
        return await retry(attempt, on=TransientError, deadline=latest, noticed=self._notice)

    def _notice(self, error: Exception, wait_s: float) -> None:
        self._last_trouble = str(error)
        if self._log is not None and not isinstance(error, ReplicaBusyError):
            self._log.info("policy.retried", cause=str(error), wait_s=round(wait_s, 3))


@asynccontextmanager
async def open_policy_client(
    urls: str | Sequence[str],
    *,
    request_s: float,
    log: EventLog | None = None,
    max_connections: int = 128,
    dialect: Dialect | None = None,
    session: Callable[[], str | None] | None = None,
    api_key: str | None = None,
    watch_s: float = 1.0,
    spread: float = SPREAD,
) -> AsyncIterator[PolicyClient]:
    """`request_s`: the deadline of one request, retries included, unless the caller sets a shorter one.

    `session` names the episode that is asking; its turns go to one replica. Unset, prompts that begin alike go together.
    """
    async with open_fleet(
        [urls] if isinstance(urls, str) else urls,
        dialect or OwnDialect(),
        max_connections=max_connections,
        watch_s=watch_s,
        spread=spread,
        api_key=api_key,
        log=log,
    ) as fleet:
        client = PolicyClient(fleet, request_s=request_s, log=log, session=session)
        try:
            yield client
        finally:
            await client.close()


def _fail(asks: list[_Ask], error: RollbookError) -> None:
    for ask in asks:
        if not ask.answer.done():
            # An exception of its own for each: a shared one would collect everybody's traceback.
            own = TransientError(str(error)) if isinstance(error, TransientError) else type(error)(str(error))
            own.__cause__ = error
            ask.answer.set_exception(own)
