"""The policy client: requests completions from one policy server or a fleet. Satisfies `ports.Policy`.

Each request has one deadline and one retry loop; every attempt goes to the best replica at that time. Short requests with the same
settings share an HTTP request, because an HTTP exchange costs more than a token of a small model. The number of bundles in flight
is limited. Requests that arrive meanwhile form the next bundles, so bundles grow with the load and a single request never waits.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rollbook.concurrency.deadline import Deadline
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import EpisodeError, RollbookError, TransientError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.client.fleet import Fleet, ReplicaSource, open_fleet
from rollbook.inference.client.replica_choice import AFFINITY_SPREAD, prompt_session
from rollbook.inference.client.server_protocol import CompletionRequest, RollbookProtocol, ServerProtocol
from rollbook.inference.connection import ReplicaBusyError
from rollbook.telemetry.events import EventLog

BUNDLE_MAX_TOKENS = 8
"""Longer requests are sent alone: in a bundle, the first to finish waits for the last."""
BUNDLES_IN_FLIGHT = 4
"""For each replica: enough to keep its engine supplied. More would only make the bundles smaller."""

BundleKey = tuple[SamplingParams, int]
"""What the requests of a bundle share: sampling parameters (without the seed) and the home replica."""


@dataclass(slots=True, eq=False)
class _Pending:
    request: CompletionRequest
    session: str | None
    deadline: Deadline
    completion: asyncio.Future[Completion]


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
        self._queued: dict[BundleKey, list[_Pending]] = {}
        self._is_flush_scheduled = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._last_error: str | None = None

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
        """Raises `TransientError` when the deadline expires, `EpisodeError` when the prompt is invalid."""
        budget_s = self._request_s if timeout_s is None else timeout_s
        prompt = prompt_ids if type(prompt_ids) is list else list(map(int, prompt_ids))
        pending = _Pending(
            request=CompletionRequest(prompt=prompt, sampling=sampling, min_publication=min_publication),
            session=self._session_of(prompt),
            deadline=Deadline(budget_s, "policy request"),
            completion=self._loop.create_future(),
        )
        try:
            async with asyncio.timeout(budget_s):
                if sampling.max_tokens > BUNDLE_MAX_TOKENS or self._fleet.protocol.bundle_size == 1:
                    return (await self._request([pending]))[0]
                self._enqueue(pending)
                return await pending.completion
        except TimeoutError as error:
            last_error = f"; last error: {self._last_error}" if self._last_error else ""
            raise TransientError(
                f"policy request to {self._fleet.urls} was not completed within {budget_s:g} s{last_error}"
            ) from error

    async def close(self) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        for queue in self._queued.values():
            for pending in queue:
                pending.completion.cancel()
        self._queued.clear()

    def _session_of(self, prompt: list[int]) -> str | None:
        if len(self._fleet.replicas) == 1:
            return None
        name = None if self._session is None else self._session()
        return prompt_session(prompt) if name is None else name

    def _enqueue(self, pending: _Pending) -> None:
        # Requests that differ only in their seed may share a bundle.
        sampling = pending.request.sampling
        shared = sampling if sampling.seed is None else replace(sampling, seed=None)
        self._queued.setdefault((shared, self._fleet.home(pending.session)), []).append(pending)
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            # At the end of this loop iteration, so that all requests of the iteration are bundled.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        size = self._fleet.protocol.bundle_size
        while self._queued and len(self._in_flight) < BUNDLES_IN_FLIGHT * len(self._fleet.replicas):
            key = next(iter(self._queued))
            queue = self._queued.pop(key)
            if len(queue) > size:
                self._queued[key] = queue[size:]
            if waiting := [pending for pending in queue[:size] if not pending.completion.done()]:
                self._send(waiting)

    def _send(self, bundle: list[_Pending]) -> None:
        task = self._loop.create_task(self._complete_bundle(bundle), name="policy.bundle")
        waiting = len(bundle)

        def on_request_done(_completion: asyncio.Future[Completion]) -> None:
            nonlocal waiting
            waiting -= 1
            # All requests are done or cancelled: free their slots on the server.
            if waiting == 0:
                task.cancel()

        def on_bundle_done(_task: asyncio.Task[None]) -> None:
            self._in_flight.discard(task)
            self._flush()

        for pending in bundle:
            pending.completion.add_done_callback(on_request_done)
        self._in_flight.add(task)
        task.add_done_callback(on_bundle_done)

    async def _complete_bundle(self, bundle: list[_Pending]) -> None:
        """Send a bundle and distribute the results. Never raises: each request receives its own outcome."""
        try:
            completions = await self._request(bundle)
        except EpisodeError as error:
            if len(bundle) == 1:
                _fail(bundle, error)
                return
            # One request is invalid and the server does not say which: send them one by one.
            for pending in bundle:
                if not pending.completion.done():
                    await self._complete_bundle([pending])
        except RollbookError as error:
            _fail(bundle, error)
        else:
            for pending, completion in zip(bundle, completions, strict=True):
                if not pending.completion.done():
                    pending.completion.set_result(completion)

    async def _request(self, bundle: list[_Pending]) -> list[Completion]:
        """The only retry loop. A failed attempt is not repeated at the same replica while another one is left."""
        failed: set[int] = set()
        session = bundle[0].session
        requests = [pending.request for pending in bundle]
        min_publication = max(request.min_publication for request in requests)

        async def attempt() -> list[Completion]:
            if len(failed) == len(self._fleet.replicas):
                failed.clear()
            at = self._fleet.choose(session=session, min_publication=min_publication, avoid=failed)
            try:
                with self._fleet.request(at) as connection:
                    return await self._fleet.protocol.complete(connection, requests)
            except TransientError:
                failed.add(at)
                raise

        latest = max((pending.deadline for pending in bundle), key=Deadline.remaining_s)
        return await retry(attempt, on=TransientError, deadline=latest, on_retry=self._on_retry)

    def _on_retry(self, error: Exception, wait_s: float) -> None:
        self._last_error = str(error)
        if self._log is not None and not isinstance(error, ReplicaBusyError):
            self._log.info("policy.retried", cause=str(error), wait_s=round(wait_s, 3))


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
        client = PolicyClient(fleet, request_s=request_s, log=log, session=session)
        try:
            yield client
        finally:
            await client.close()


def _fail(bundle: list[_Pending], error: RollbookError) -> None:
    for pending in bundle:
        if not pending.completion.done():
            # A separate exception for each request: a shared one would collect the tracebacks of all of them.
            own = TransientError(str(error)) if isinstance(error, TransientError) else type(error)(str(error))
            own.__cause__ = error
            pending.completion.set_exception(own)
