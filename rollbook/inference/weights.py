"""Pushes published weights to every replica of the policy server; satisfies `ports.WeightReceiver`.

A publication is live when every replica reports it, digest included. Updates are keyed by publication: repeating one is harmless.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import retry
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.policy import Publication
from rollbook.inference.connection import PolicyConnection, open_connection, plain_decoder
from rollbook.inference.wire_weights import UpdateBody, UpdateInfo, WeightInfo
from rollbook.telemetry.events import EventLog

T = TypeVar("T")
CONNECTIONS = 4
"""To each replica: one update and a few questions at a time."""


class WeightTransferClient:
    """Open with `async with`. Raises `FencedError` when a replica has heard from a newer trainer."""

    def __init__(self, urls: Sequence[str], *, request_s: float, log: EventLog | None = None) -> None:
        if not urls:
            raise ValueError("weights need at least one policy server to go to")
        self._urls = tuple(urls)
        self._request_s = request_s
        self._log = log
        self._stack = AsyncExitStack()
        self._replicas: list[PolicyConnection] = []
        self._weight_info = msgspec.json.Decoder(WeightInfo)
        self._ignore = plain_decoder()

    async def __aenter__(self) -> "WeightTransferClient":
        for url in self._urls:
            opened = await self._stack.enter_async_context(open_connection(url, max_connections=CONNECTIONS))
            self._replicas.append(opened)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._replicas.clear()
        await self._stack.aclose()

    async def receive(self, publication: Publication, location: str) -> None:
        """Load the file at `location` into every replica; returns when all of them report it."""
        info = UpdateInfo(
            path=location,
            publication=publication.id,
            step=publication.step,
            epoch=publication.epoch,
            digest=publication.digest,
        )
        body = msgspec.json.encode(UpdateBody(update_info=info))

        async def update(replica: PolicyConnection) -> None:
            await replica.post("/update_weights", body, self._ignore)
            told = (await replica.get("/weight_info", self._weight_info)).to_contract()
            if told != publication:
                # Restarted in between, or a newer publication came: pushing again settles which.
                raise TransientError(f"{replica.url} was given publication {publication.id} but reports {told}")

        await self._everywhere(update, f"publication {publication.id}")
        if self._log is not None:
            self._log.info(
                "policy.weights_published", publication=publication.id, step=publication.step, replicas=len(self._urls)
            )

    async def reported(self) -> Sequence[Publication | None]:
        """What each replica has, in the order of the urls. Raises `TransientError` when one cannot be asked."""

        async def ask(replica: PolicyConnection) -> Publication | None:
            return (await replica.get("/weight_info", self._weight_info)).to_contract()

        return await self._everywhere(ask, "weight_info")

    async def pause(self, mode: str = "keep") -> None:
        """`keep` holds running requests, `wait` lets them finish, `abort` ends them."""

        async def pause(replica: PolicyConnection) -> None:
            await replica.post(f"/pause?mode={mode}", b"", self._ignore)

        await self._everywhere(pause, f"pause ({mode})")

    async def resume(self) -> None:
        async def resume(replica: PolicyConnection) -> None:
            await replica.post("/resume", b"", self._ignore)

        await self._everywhere(resume, "resume")

    async def _everywhere(self, act: Callable[[PolicyConnection], Awaitable[T]], what: str) -> list[T]:
        """Do it at every replica at once, each with the one deadline. The first error is raised when all have ended."""
        deadline = Deadline(self._request_s, what)
        outcomes = await asyncio.gather(
            *(self._with_retry(act, replica, what, deadline) for replica in self._replicas), return_exceptions=True
        )
        results: list[T] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    async def _with_retry(
        self, act: Callable[[PolicyConnection], Awaitable[T]], replica: PolicyConnection, what: str, deadline: Deadline
    ) -> T:
        async def attempt() -> T:
            async with deadline.limit(f"{what} at {replica.url}"):
                return await act(replica)

        try:
            return await retry(attempt, on=TransientError, deadline=deadline, noticed=self._notice)
        except DeadlineExceededError as error:
            raise TransientError(str(error)) from error
        except EpisodeError as error:
            # A 400 here is no episode's fault: the weights or the wiring are wrong, and repeating will not help.
            raise RunError(f"{what} was refused: {error}") from error

    def _notice(self, error: Exception, wait_s: float) -> None:
        if self._log is not None:
            self._log.info("policy.push_retried", cause=str(error), wait_s=round(wait_s, 3))
