"""Pushes published weights to every replica of the policy; satisfies `ports.WeightReceiver` and `ports.WeightStage`.

A publication is live when every replica in service reports it, digest included. A replica that could not take it in time is put in
quarantine: it no longer holds up the others, and it is brought up to date as soon as it answers again. Updates are keyed by
publication: repeating one is harmless.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.concurrency.retry import retry
from rollbook.contracts.adapter import Adapter
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.policy import Publication
from rollbook.contracts.ports import Fence
from rollbook.inference.config import UpdateSequence
from rollbook.inference.connection import PolicyConnection, open_connection
from rollbook.inference.weights.process_group import WeightGroup
from rollbook.inference.weights.server_api import OwnVerbs, WeightVerbs
from rollbook.inference.weights.transport import TransferWay, message
from rollbook.inference.wire.weights import AdapterInfo
from rollbook.telemetry.events import EventLog

T = TypeVar("T")
Act = Callable[[int], Awaitable[T]]

CONNECTIONS = 4
"""To each replica: one update and a few questions at a time."""
QUARANTINE_TRY_S = 2.0
"""A replica in quarantine is given this long to show that it is back. It must not hold up the others."""


@dataclass(frozen=True, slots=True)
class _Push:
    publication: Publication
    location: str
    deadline: Deadline
    fence: Fence | None
    """Asked before each try, where replicas do not refuse a trainer that was replaced."""

    async def ask_fence(self) -> None:
        if self.fence is not None:
            await self.fence()


class WeightTransferClient:
    """Open with `async with`, once the optimizer exists: groups are formed with the first push and left at the end.

    Raises `FencedError` when a replica has heard from a newer trainer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        request_s: float,
        confirm_s: float | None = None,
        way: TransferWay | None = None,
        verbs: WeightVerbs | None = None,
        sequence: UpdateSequence = UpdateSequence.IN_FLIGHT,
        check_digest: bool = True,
        api_key: str | None = None,
        log: EventLog | None = None,
    ) -> None:
        if not urls:
            raise ValueError("weights need at least one policy server to go to")
        self._urls = tuple(urls)
        self._request_s = request_s
        self._confirm_s = request_s if confirm_s is None else confirm_s
        self._way = way
        self._verbs = verbs or OwnVerbs()
        self._group = None if way is None or not way.is_group else WeightGroup(way, self._verbs)
        self._sequence = sequence
        self._check_digest = check_digest
        self._api_key = api_key
        self._log = log
        self._stack = AsyncExitStack()
        self._replicas: list[PolicyConnection] = []
        self._quarantined: set[int] = set()
        self._dtypes: dict[str, str | None] = {}
        self._adapters: dict[str, AdapterInfo] = {}
        self._has_warned = False

    async def __aenter__(self) -> "WeightTransferClient":
        for url in self._urls:
            opened = await self._stack.enter_async_context(
                open_connection(url, max_connections=CONNECTIONS, api_key=self._api_key)
            )
            self._replicas.append(opened)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._group is not None:
            await self._group.dissolve()
        if self._way is not None:
            await self._way.close()
        self._replicas.clear()
        await self._stack.aclose()

    @property
    def quarantined(self) -> tuple[str, ...]:
        return tuple(self._urls[at] for at in sorted(self._quarantined))

    async def put(self, publication: Publication, weights: Mapping[str, Any], *, adapter: Adapter | None = None) -> str:
        """Keep weights, or an adapter's, where replicas can take them; gives the location for `receive`."""
        if self._way is None:
            raise RunError("this client was given no way to keep weights")
        location = await self._way.put(publication, weights, adapter=adapter)
        if adapter is not None:
            self._adapters[location] = AdapterInfo.of(adapter)
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
        self._dtypes[location] = dtypes.pop() if len(dtypes) == 1 else None
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._dtypes = {location: dtype for location, dtype in self._dtypes.items() if location in locations}
        self._adapters = {location: info for location, info in self._adapters.items() if location in locations}
        if self._way is not None:
            await self._way.keep_only(locations)

    async def receive(
        self, publication: Publication, location: str, *, within_s: float | None = None, fence: Fence | None = None
    ) -> None:
        """Load the weights at `location` into every replica in service; returns when all of them report it.

        `within_s`: how long it is tried while no replica can take them; `confirm_s` unless told.
        """
        self._has_warned = False
        await self._release_who_is_back()
        serving = self._serving()
        deadline = Deadline(self._confirm_s if within_s is None else within_s, f"publication {publication.id}")
        push = _Push(publication, location, deadline, None if self._verbs.refuses_old_epochs else fence)
        if self._sequence is UpdateSequence.PAUSED:
            await self._push_paused(serving, push)
        else:
            await self._push(serving, push)
        if self._log is not None:
            self._log.info(
                "policy.weights_published",
                publication=publication.id,
                step=publication.step,
                replicas=len(self._serving()),
                quarantined=len(self._quarantined),
            )

    async def reported(self) -> Sequence[Publication | None]:
        """What each replica has, in the order of the urls; one in quarantine that does not answer is left out.

        Raises `TransientError` when one in service cannot be asked.
        """
        await self._release_who_is_back()

        async def ask(at: int) -> Publication | None:
            return await self._verbs.publication(self._replicas[at])

        return await self._everywhere(self._serving(), ask, "weight_info", Deadline(self._request_s, "weight_info"))

    async def pause(self, mode: str = "keep") -> None:
        """`keep` holds running requests, `wait` lets them finish, `abort` ends them."""

        async def pause(at: int) -> None:
            await self._verbs.pause(self._replicas[at], mode)

        await self._everywhere(self._serving(), pause, f"pause ({mode})", Deadline(self._request_s, "pause"))

    async def resume(self) -> None:
        async def resume(at: int) -> None:
            await self._verbs.resume(self._replicas[at])

        await self._everywhere(self._serving(), resume, "resume", Deadline(self._request_s, "resume"))

    def _serving(self) -> list[int]:
        return [at for at in range(len(self._replicas)) if at not in self._quarantined]

    async def _release_who_is_back(self) -> None:
        """Out of quarantine comes who answers. What it has may still be old: it is told as such, and pushed to."""

        async def look(at: int) -> None:
            try:
                async with asyncio.timeout(QUARANTINE_TRY_S):
                    await self._verbs.publication(self._replicas[at])
            except (TransientError, TimeoutError):
                return
            self._quarantined.discard(at)
            if self._log is not None:
                self._log.info("policy.replica_back", url=self._urls[at])

        await asyncio.gather(*(look(at) for at in tuple(self._quarantined)))

    async def _push_paused(self, serving: Sequence[int], push: _Push) -> None:
        """Pause all of them; then send; then resume all of them, whatever happened in between."""

        async def pause(at: int) -> None:
            await self._verbs.pause(self._replicas[at], "keep")

        async def resume(at: int) -> None:
            await self._verbs.resume(self._replicas[at])

        held = await self._those_that_can(serving, pause, "pause", push.deadline)
        try:
            await self._push(held, push)
        finally:
            # A deadline of its own: a replica that is left paused answers nobody.
            await self._those_that_can(held, resume, "resume", Deadline(self._request_s, "resume"))

    async def _push(self, serving: Sequence[int], push: _Push) -> None:
        publication, location = push.publication, push.location
        info = (
            message(publication, "directory", path=location)
            if self._way is None
            else self._way.update_info(publication, location)
        )
        info.adapter = self._adapters.get(location)
        dtype = self._dtypes.get(location) if self._check_digest else None

        async def update(at: int) -> None:
            if self._group is None:
                await push.ask_fence()
                await self._verbs.update(self._replicas[at], info)
            await self._verbs.require(self._replicas[at], publication, dtype=dtype)

        if self._group is not None:
            serving = await self._send_to_group(serving, info, push)
        await self._those_that_can(serving, update, f"publication {publication.id}", push.deadline)

    async def _send_to_group(self, serving: Sequence[int], info: Any, push: _Push) -> Sequence[int]:
        """All at once or not at all. When a member is gone, those that still answer form the next group."""
        assert self._group is not None
        group, left = self._group, list(serving)

        async def attempt() -> list[int]:
            try:
                async with self._one_try(push.deadline, "weight group"):
                    await push.ask_fence()
                    await group.send(self._replicas, left, info, push.location)
            except TransientError:
                left[:] = await self._those_that_answer(left)
                raise
            return left

        sent = await retry(attempt, on=TransientError, deadline=push.deadline, noticed=self._notice)
        self._quarantine(set(serving) - set(sent), "it left the weight group")
        return sent

    async def _those_that_answer(self, replicas: Sequence[int]) -> list[int]:
        async def look(at: int) -> bool:
            try:
                async with asyncio.timeout(QUARANTINE_TRY_S):
                    await self._verbs.publication(self._replicas[at])
            except (TransientError, TimeoutError):
                return False
            return True

        answers = await asyncio.gather(*(look(at) for at in replicas))
        # Nobody: then it is not theirs to be left out, and the next try asks all of them again.
        return [at for at, is_there in zip(replicas, answers, strict=True) if is_there] or list(replicas)

    async def _those_that_can(
        self, replicas: Sequence[int], act: Act[None], what: str, deadline: Deadline
    ) -> list[int]:
        """Do it everywhere; who cannot while others can goes into quarantine. Raises when nobody can, or a person must act."""
        acts = [asyncio.create_task(self._with_retry(act, at, what, deadline)) for at in replicas]
        try:
            await self._until_others_waited_enough(acts)
        finally:
            for one in acts:
                one.cancel()
            outcomes = await asyncio.gather(*acts, return_exceptions=True)
        missed: dict[int, TransientError] = {}
        for at, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                late = f"{what} at {self._urls[at]}: another replica was through {self._confirm_s:g} s ago"
                missed[at] = TransientError(late)
            elif isinstance(outcome, TransientError):
                missed[at] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if len(missed) == len(replicas):
            raise next(iter(missed.values()))
        for at, error in missed.items():
            self._quarantine({at}, str(error))
        return [at for at in replicas if at not in missed]

    async def _until_others_waited_enough(self, acts: Collection["asyncio.Task[Any]"]) -> None:
        """Until all have ended, or `confirm_s` after one was through. While none is, it is not a single replica's fault."""
        ended, waiting = set[asyncio.Task[Any]](), set(acts)
        while waiting and all(isinstance(one.exception(), TransientError) for one in ended):
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended |= more
        if waiting:
            await asyncio.wait(waiting, timeout=self._confirm_s)

    async def _everywhere(self, replicas: Sequence[int], act: Act[T], what: str, deadline: Deadline) -> list[T]:
        """Do it at every one of them at once, each with the one deadline. The first error is raised when all have ended."""
        results: list[T] = []
        for outcome in await self._try_everywhere(replicas, act, what, deadline):
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    async def _try_everywhere(
        self, replicas: Sequence[int], act: Act[T], what: str, deadline: Deadline
    ) -> list[T | BaseException]:
        return await asyncio.gather(
            *(self._with_retry(act, at, what, deadline) for at in replicas), return_exceptions=True
        )

    async def _with_retry(self, act: Act[T], at: int, what: str, deadline: Deadline) -> T:
        async def attempt() -> T:
            async with self._one_try(deadline, f"{what} at {self._urls[at]}"):
                return await act(at)

        try:
            return await retry(attempt, on=TransientError, deadline=deadline, noticed=self._notice)
        except EpisodeError as error:
            # A 400 here is no episode's fault: the weights or the wiring are wrong, and repeating will not help.
            raise RunError(f"{what} was refused: {error}") from error

    @asynccontextmanager
    async def _one_try(self, deadline: Deadline, what: str) -> AsyncIterator[None]:
        """One that is never answered ends after `confirm_s`, and may be tried again."""
        try:
            async with deadline.limit(what, at_most_s=self._confirm_s):
                yield
        except DeadlineExceededError as error:
            raise TransientError(str(error)) from error

    def _quarantine(self, replicas: Collection[int], cause: str) -> None:
        for at in replicas:
            self._quarantined.add(at)
            if self._log is not None:
                self._log.warning("policy.replica_quarantined", url=self._urls[at], cause=cause)

    def _notice(self, error: Exception, wait_s: float) -> None:
        """One warning a push, however often it is tried: the second says nothing that the first did not."""
        if self._log is not None:
            tell = self._log.info if self._has_warned else self._log.warning
            tell("policy.push_retried", cause=str(error), wait_s=round(wait_s, 3))
            self._has_warned = True
