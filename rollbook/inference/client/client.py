"""The policy client: requests completions from one policy server or a fleet. Satisfies `ports.Policy`.

Each request has one deadline and one retry loop; every attempt goes to the best replica at that time. Requests of one process to
one server share a connection (`token_stream.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rollbook.concurrency.clock import SystemClock
from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import TransientError, WeightsAwaitedError
from rollbook.contracts.policy import Completion, FinishReason, OnTokens, SamplingParams, TokenChunk, joined_completion
from rollbook.inference.client.fleet import Fleet, ReplicaSource, open_fleet
from rollbook.inference.client.replica_choice import AFFINITY_SPREAD, prompt_session
from rollbook.inference.client.server_protocol import CompletionRequest, RollbookProtocol, ServerProtocol
from rollbook.inference.connection import ReplicaBusyError
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.waits import WAITS

REQUESTS = "the policy servers to respond"


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
        # One for all requests: of thousands that wait, each would hold two.
        self._clock = SystemClock()

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
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Raises `TransientError` when the deadline expires, `EpisodeError` when the prompt is invalid.

        Tokens that `on_tokens` received are never sampled again: if the connection is lost after them, the completion is aborted.
        """
        budget_s = self._request_s if timeout_s is None else timeout_s
        prompt = prompt_ids if type(prompt_ids) is list else list(map(int, prompt_ids))
        received: list[TokenChunk] = []

        def receive(chunk: TokenChunk) -> None:
            received.append(chunk)
            if on_tokens is not None:
                on_tokens(chunk)

        request = CompletionRequest(
            prompt=prompt,
            sampling=sampling,
            min_publication=min_publication,
            on_tokens=None if on_tokens is None else receive,
        )
        deadline = Deadline(budget_s, "policy request", clock=self._clock)
        failures: list[Exception] = []
        try:
            async with asyncio.timeout(budget_s):
                return await self._request(request, self._session_of(prompt), deadline, received, failures)
        except TimeoutError as error:
            last_error = f"; last error: {failures[0]}" if failures else ""
            kind = WeightsAwaitedError if failures and isinstance(failures[0], WeightsAwaitedError) else TransientError
            raise kind(
                f"policy request to {self._fleet.urls} was not completed within {budget_s:g} s{last_error}"
            ) from error

    def _session_of(self, prompt: list[int]) -> str | None:
        if len(self._fleet.replicas) == 1:
            return None
        name = None if self._session is None else self._session()
        return prompt_session(prompt) if name is None else name

    async def _request(
        self,
        request: CompletionRequest,
        session: str | None,
        deadline: Deadline,
        received: Sequence[TokenChunk],
        failures: list[Exception],
    ) -> Completion:
        """The only retry loop. A failed attempt is not repeated at the same replica while another one is left.

        `failures` gets the error of the last attempt.
        """
        failed: set[int] = set()

        async def attempt() -> Completion:
            if len(failed) == len(self._fleet.replicas):
                failed.clear()
            at = self._fleet.choose(session=session, min_publication=request.min_publication, avoid=failed)
            try:
                with self._fleet.request(at) as connection:
                    return await self._fleet.protocol.complete(connection, request)
            except TransientError:
                if received:
                    return joined_completion(received, FinishReason.ABORT)
                failed.add(at)
                raise

        def on_retry(error: Exception, wait_s: float) -> None:
            failures[:] = [error]
            if not isinstance(error, ReplicaBusyError):
                WAITS.failing(REQUESTS, str(error))
                if self._log is not None:
                    self._log.info("policy.retried", cause=str(error), wait_s=round(wait_s, 3))

        completion = await retry(attempt, on=TransientError, deadline=deadline, clock=self._clock, on_retry=on_retry)
        WAITS.recovered(REQUESTS)
        return completion


@asynccontextmanager
async def open_policy_client(
    urls: str | Sequence[str],
    *,
    request_s: float,
    log: EventLog | None = None,
    max_connections: int = 128,
    protocol: ServerProtocol | None = None,
    session: Callable[[], str | None] | None = None,
    api_key: str | None = None,
    watch_s: float = 1.0,
    spread: float = AFFINITY_SPREAD,
    source: ReplicaSource | None = None,
) -> AsyncIterator[PolicyClient]:
    """`request_s`: the deadline of one request including retries, unless the caller sets a shorter one.

    `session` names the current episode, whose turns go to one replica. Without it, prompts with the same start share a replica.
    `source` lists the replicas, where the list may change while the client is open.
    """
    async with open_fleet(
        [urls] if isinstance(urls, str) else urls,
        protocol or RollbookProtocol(),
        max_connections=max_connections,
        watch_s=watch_s,
        spread=spread,
        api_key=api_key,
        log=log,
        source=source,
    ) as fleet:
        yield PolicyClient(fleet, request_s=request_s, log=log, session=session)
