"""Asks a policy server for completions; satisfies `ports.Policy`.

One deadline for a request, one bounded retry inside it. Short requests that are asked at the same time with the same settings
travel in one HTTP request: an HTTP exchange costs more than a token of a small model does. At most a few bundles are under way;
what is asked meanwhile forms the next ones, so bundles grow with the load and a lone request is never held back.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import EpisodeError, RollbookError, TransientError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.connection import PolicyConnection, open_connection
from rollbook.inference.wire import CompletionBody, CompletionReply
from rollbook.telemetry.events import EventLog

BUNDLE_MAX_TOKENS = 8
"""Longer requests travel alone: in a bundle, the first to finish waits for the last."""
BUNDLE_SIZE = 64
BUNDLES_UNDER_WAY = 4
"""Enough that the engine always has the next bundle at hand; more would only make them smaller."""

_COMPLETIONS = "/v1/completions"


@dataclass(slots=True, eq=False)
class _Ask:
    prompt: list[int]
    sampling: SamplingParams
    min_publication: int
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

    def __init__(self, connection: PolicyConnection, *, request_s: float, log: EventLog | None = None) -> None:
        self._connection = connection
        self._request_s = request_s
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.json.Decoder(CompletionReply)
        self._encode = msgspec.json.Encoder().encode
        self._asked: dict[SamplingParams, list[_Ask]] = {}
        self._is_flush_due = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._last_trouble: str | None = None

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
        ask = _Ask(
            prompt=prompt_ids if type(prompt_ids) is list else list(map(int, prompt_ids)),
            sampling=sampling,
            min_publication=min_publication,
            deadline=Deadline(budget_s, "policy request"),
            answer=self._loop.create_future(),
        )
        try:
            async with asyncio.timeout(budget_s):
                if sampling.max_tokens > BUNDLE_MAX_TOKENS:
                    return (await self._exchange([ask]))[0]
                self._enqueue(ask)
                return await ask.answer
        except TimeoutError as error:
            trouble = f"; last trouble: {self._last_trouble}" if self._last_trouble else ""
            raise TransientError(
                f"policy request to {self._connection.url} was not answered within {budget_s:g} s{trouble}"
            ) from error

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
        settings = ask.sampling if ask.sampling.seed is None else replace(ask.sampling, seed=None)
        self._asked.setdefault(settings, []).append(ask)
        if not self._is_flush_due:
            self._is_flush_due = True
            # At the end of this turn of the loop: whoever else asks in it comes along.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        while self._asked and len(self._under_way) < BUNDLES_UNDER_WAY:
            settings = next(iter(self._asked))
            asks = self._asked.pop(settings)
            if len(asks) > BUNDLE_SIZE:
                self._asked[settings] = asks[BUNDLE_SIZE:]
            self._send([ask for ask in asks[:BUNDLE_SIZE] if not ask.answer.done()])

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
        body = self._encode(_body(asks))

        async def attempt() -> list[Completion]:
            reply = await self._connection.post(_COMPLETIONS, body, self._decoder)
            try:
                if len(reply.choices) != len(asks):
                    raise ValueError(f"{len(reply.choices)} choices for {len(asks)} prompts")
                return [choice.to_contract() for choice in reply.choices]
            except ValueError as error:
                raise TransientError(f"{self._connection.url} gave an answer that does not fit: {error}") from error

        latest = max((ask.deadline for ask in asks), key=Deadline.remaining_s)
        return await retry(attempt, on=TransientError, deadline=latest, noticed=self._notice)

    def _notice(self, error: Exception, wait_s: float) -> None:
        self._last_trouble = str(error)
        if self._log is not None:
            self._log.info("policy.retried", cause=str(error), wait_s=round(wait_s, 3))


@asynccontextmanager
async def open_policy_client(
    url: str, *, request_s: float, log: EventLog | None = None, max_connections: int = 128
) -> AsyncIterator[PolicyClient]:
    """`request_s`: the deadline of one request, retries included, unless the caller sets a shorter one."""
    async with open_connection(url, max_connections=max_connections) as connection:
        client = PolicyClient(connection, request_s=request_s, log=log)
        try:
            yield client
        finally:
            await client.close()


def _body(asks: list[_Ask]) -> CompletionBody:
    sampling = asks[0].sampling
    seeds = [ask.sampling.seed for ask in asks]
    return CompletionBody(
        prompt=list(asks[0].prompt) if len(asks) == 1 else [ask.prompt for ask in asks],
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seeds[0] if len(asks) == 1 else None,
        seeds=seeds if len(asks) > 1 and any(seed is not None for seed in seeds) else None,
        stop_token_ids=list(sampling.stop_token_ids),
        # What ends a turn is the caller's choice alone, and it reads tokens: no text is made for it.
        ignore_eos=True,
        detokenize=False,
        return_token_ids=True,
        logprobs=0,
        # The newest minimum serves all: each gets weights at least as new as it asked for.
        min_publication=max(ask.min_publication for ask in asks),
    )


def _fail(asks: list[_Ask], error: RollbookError) -> None:
    for ask in asks:
        if not ask.answer.done():
            # An exception of its own for each: a shared one would collect everybody's traceback.
            own = TransientError(str(error)) if isinstance(error, TransientError) else type(error)(str(error))
            own.__cause__ = error
            ask.answer.set_exception(own)
