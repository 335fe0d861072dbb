"""Pushes published weights to every replica of the policy; satisfies `ports.WeightReceiver` and `ports.WeightStage`.

A publication is live when every replica in service reports it. A replica that does not accept it in time is quarantined: it no
longer delays the others, and it is updated as soon as it responds again. Updates are keyed by publication, so repeating one is
harmless. A server that fails at an update every time ends the run, unless another replica accepts it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError, finish
from rollbook.concurrency.retry import retry
from rollbook.concurrency.tasks import results_of
from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.policy import Publication, SamplerExactness
from rollbook.contracts.ports import Fence
from rollbook.contracts.weights import Adapter
from rollbook.inference.config import UpdateSequence
from rollbook.inference.connection import NoServerError, PolicyConnection, ServerFailedError, open_connection
from rollbook.inference.weights.process_group import WeightGroup
from rollbook.inference.weights.server_api import GroupServerApi, RollbookServerApi, WeightServerApi
from rollbook.inference.weights.transport import GroupTransport, SharingTransport, WeightTransport, update_message
from rollbook.inference.wire.weights import AdapterInfo, UpdateInfo
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.waits import WAITS

T = TypeVar("T")
Operation = Callable[[int], Awaitable[T]]
"""Runs at one replica, given its index."""

CONNECTIONS = 4
"""To each replica: one update and a few status requests at a time."""
QUARANTINE_TRY_S = 2.0
"""How long a status request to a quarantined replica may take. It must not delay the others."""
MAX_FAILURES, FAILING_S = 5, 15.0
"""A server that fails at one update this often, and for this long, would fail at the next attempt too."""
PUSH = "the policy servers to load weights"
PROBATION_S, PROBATION_FACTOR = 1.0, 4.0
"""A replica on probation gets this time, and this multiple of the longest successful update so far."""


@dataclass(frozen=True, slots=True)
class _Push:
    publication: Publication
    location: str
    deadline: Deadline
    fence: Fence | None
    """Checked before each attempt, where replicas themselves do not refuse a replaced trainer."""

    async def check_fence(self) -> None:
        if self.fence is not None:
            await self.fence()


class UpdateFailsError(RunError):
    """A policy server fails at an update every time, or was never there."""


class _FailureLimit:
    """Ends the attempts at one replica that cannot succeed. `absent_s`: how long nothing may listen at its address."""

    def __init__(self, url: str, operation: str, *, absent_s: float | None) -> None:
        self._url = url
        self._operation = operation
        self._absent_s = absent_s
        self._began = time.monotonic()
        self._failures = 0

    def check(self, error: TransientError) -> None:
        seconds = time.monotonic() - self._began
        if isinstance(error, ServerFailedError):
            self._failures += 1
            if self._failures >= MAX_FAILURES and seconds >= FAILING_S:
                raise UpdateFailsError(
                    f"the policy server at {self._url} failed {self._failures} times in {seconds:.0f} s at {self._operation}. "
                    f"The last error: {error}. Its log has the traceback. If its memory is full, lower inference.max_running or "
                    "inference.kv_memory_mb, or train a smaller model; then start the run again: it resumes"
                ) from error
        elif isinstance(error, NoServerError) and self._absent_s is not None and seconds >= self._absent_s:
            raise UpdateFailsError(
                f"no policy server at {self._url} (inference.urls) for {seconds:.0f} s: {error}. Start it, or correct the address"
            ) from error


class WeightTransferClient:
    """Open with `async with`. Process groups are formed with the first push and dissolved at the end.

    Raises `FencedError` when a replica has received weights from a newer trainer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        request_s: float,
        confirm_s: float | None = None,
        transport: WeightTransport | None = None,
        server_api: WeightServerApi | None = None,
        sequence: UpdateSequence = UpdateSequence.IN_FLIGHT,
        check_digest: bool = True,
        api_key: str | None = None,
        log: EventLog | None = None,
        source: Callable[[], Awaitable[Sequence[str]]] | None = None,
        absent_s: float | None = None,
    ) -> None:
        """`source` lists the replicas in service, where the list may change; `urls` are those at the start.

        `absent_s`: how long nothing may listen at the address of a replica that has not responded yet (default: as long as an
        update may take).
        """
        if not urls:
            raise ValueError("the weight client needs the URL of at least one policy server")
        self._urls = [url.rstrip("/") for url in urls]
        self._source = source
        self._absent_s = absent_s
        self._request_s = request_s
        self._confirm_s = request_s if confirm_s is None else confirm_s
        self._transport = transport
        self._server_api = server_api or RollbookServerApi()
        self._group = _weight_group(transport, self._server_api)
        self._sequence = sequence
        self._check_digest = check_digest
        self._api_key = api_key
        self._log = log
        self._stack = AsyncExitStack()
        self._replicas: list[PolicyConnection] = []
        self._quarantined: set[int] = set()
        self._on_probation: set[int] = set()
        """Replicas that were quarantined and have not loaded a publication since. A push does not wait long for them."""
        self._gone: set[int] = set()
        """Replicas that are no longer in the list. They keep their index, and may return."""
        self._following = asyncio.Lock()
        """Retries at several replicas read the list at the same time."""
        self._longest_update_s = 0.0
        self._dtypes: dict[str, str | None] = {}
        self._adapters: dict[str, AdapterInfo] = {}
        self._has_warned = False
        self._responded: set[int] = set()
        """Replicas at which a request succeeded."""
        self._paused: set[int] = set()
        """Replicas that `pause` has paused."""
        self._is_destroyed = False

    async def __aenter__(self) -> "WeightTransferClient":
        for url in self._urls:
            await self._connect(url)
        return self

    async def _connect(self, url: str) -> None:
        opened = open_connection(url, max_connections=CONNECTIONS, api_key=self._api_key)
        self._replicas.append(await self._stack.enter_async_context(opened))

    async def __aexit__(self, *error: object) -> None:
        await self.destroy()

    async def destroy(self) -> None:
        """Dissolve process groups and disconnect. The servers keep the last weights. A second call does nothing.

        Replicas that this client has paused are resumed first, because nobody else would.
        """
        is_destroyed, self._is_destroyed = self._is_destroyed, True
        if is_destroyed:
            return

        async def resume_paused() -> None:
            await asyncio.gather(*map(self._resume_one, sorted(self._paused)), return_exceptions=True)

        if self._paused:
            await finish(resume_paused(), within_s=self._confirm_s, name="resume before the end")
        if self._group is not None:
            await self._group.dissolve()
        if self._transport is not None:
            await self._transport.close()
        self._replicas.clear()
        await self._stack.aclose()

    @property
    def quarantined(self) -> tuple[str, ...]:
        return tuple(self._urls[index] for index in sorted(self._quarantined))

    @property
    def takes_gpu_weights(self) -> bool:
        return self._transport is not None and self._transport.takes_gpu_weights

    async def put(self, publication: Publication, weights: Mapping[str, Any], *, adapter: Adapter | None = None) -> str:
        """Store weights, or an adapter's tensors, for the replicas. Returns the location for `receive`."""
        if self._transport is None:
            raise RunError("this weight client was opened without a transport, so it cannot store weights")
        location = await self._transport.put(publication, weights, adapter=adapter)
        if adapter is not None:
            self._adapters[location] = AdapterInfo.of(adapter)
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
        self._dtypes[location] = dtypes.pop() if len(dtypes) == 1 else None
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._dtypes = {location: dtype for location, dtype in self._dtypes.items() if location in locations}
        self._adapters = {location: info for location, info in self._adapters.items() if location in locations}
        if self._transport is not None:
            await self._transport.keep_only(locations)

    async def receive(
        self, publication: Publication, location: str, *, within_s: float | None = None, fence: Fence | None = None
    ) -> None:
        """Load the weights at `location` into every replica in service; returns when all of them report it.

        `within_s`: how long to retry while no replica is in service or accepts them (default: `confirm_s`).
        """
        self._require_open()
        self._has_warned = False
        deadline = Deadline(self._confirm_s if within_s is None else within_s, f"publication {publication.id}")
        serving = await retry(self._in_service, on=TransientError, deadline=deadline, on_retry=self._log_retry)
        push = _Push(publication, location, deadline, None if self._server_api.refuses_old_epochs else fence)
        if self._sequence is UpdateSequence.PAUSED:
            await self._push_paused(serving, push)
        else:
            await self._push(serving, push)
        WAITS.recovered(PUSH)
        if self._log is not None:
            self._log.info(
                "policy.weights_published",
                publication=publication.id,
                step=publication.step,
                replicas=len(self._serving()),
                quarantined=len(self._quarantined),
            )

    async def reported(self) -> Sequence[Publication | None]:
        """The publication of each replica, in the order of the URLs. Quarantined replicas that do not respond are left out.

        Raises `TransientError` when a replica in service does not respond.
        """
        serving = await self._in_service()

        async def publication(index: int) -> Publication | None:
            return await self._server_api.publication(self._replicas[index])

        found = await self._at_all(serving, self._unless_gone(publication), "weight_info")
        WAITS.recovered(PUSH)
        return [one for index, one in zip(serving, found, strict=True) if index not in self._gone]

    @property
    def exactness(self) -> SamplerExactness | None:
        """What the replicas in service last said of their logprobs; None: nothing yet."""
        said = [self._server_api.exactness(self._replicas[index]) for index in self._serving()]
        return SamplerExactness.of_all([one for one in said if one is not None])

    async def pause(self, mode: str = "keep") -> None:
        """`keep` suspends running requests, `wait` lets them finish, `abort` ends them. Until `resume`, new requests wait."""
        self._require_open()

        async def pause(index: int) -> None:
            self._paused.add(index)  # even if the response is lost
            await self._server_api.pause(self._replicas[index], mode)

        await self._at_all(self._serving(), pause, f"pause ({mode})")

    async def resume(self) -> None:
        """Resume all replicas, the paused ones that are quarantined by now too."""
        self._require_open()
        await self._at_all(sorted({*self._serving(), *self._paused} - self._gone), self._resume_one, "resume")

    async def _resume_one(self, index: int) -> None:
        await self._server_api.resume(self._replicas[index])
        self._paused.discard(index)

    def _require_open(self) -> None:
        if self._is_destroyed:
            raise RunError("this weight client was destroyed; make a new one")

    async def _in_service(self) -> list[int]:
        """The replicas in service now. Raises `TransientError` if there are none."""
        await self._follow_source()
        await self._release_responding()
        if serving := self._serving():
            return serving
        if self._quarantined:
            raise TransientError(f"no policy server responds: {', '.join(self.quarantined)}")
        raise TransientError("no policy server is a member of the run")

    def _serving(self) -> list[int]:
        unused = self._quarantined | self._gone
        return [index for index in range(len(self._replicas)) if index not in unused]

    async def _follow_source(self) -> None:
        """Connect to replicas that joined: the publisher finds them without the current publication, and pushes it."""
        if self._source is None:
            return
        async with self._following:
            try:
                urls = {url.rstrip("/") for url in await self._source()}
            except TransientError as error:
                if self._log is not None:
                    self._log.warning("policy.replica_list_unknown", cause=str(error))
                return
            for url in sorted(urls - set(self._urls)):
                self._urls.append(url)
                await self._connect(url)
            self._gone = {index for index, url in enumerate(self._urls) if url not in urls}
            self._quarantined -= self._gone
            for index in self._gone:
                WAITS.recovered(_loading(self._urls[index]))

    async def _responds(self, index: int) -> bool:
        try:
            async with asyncio.timeout(QUARANTINE_TRY_S):
                await self._server_api.publication(self._replicas[index])
        except (TransientError, TimeoutError):
            return False
        return True

    async def _release_responding(self) -> None:
        """Un-quarantine replicas that respond again. Their weights may be stale; the next push updates them."""
        quarantined = tuple(self._quarantined)
        for index, is_back in zip(quarantined, await asyncio.gather(*map(self._responds, quarantined)), strict=True):
            if is_back:
                self._quarantined.discard(index)

    async def _push_paused(self, serving: Sequence[int], push: _Push) -> None:
        """Pause all replicas, push, then resume all of them, even after a failure."""

        async def pause(index: int) -> None:
            await self._server_api.pause(self._replicas[index], "keep")

        async def resume_all() -> None:
            await asyncio.gather(*map(self._resume_one, serving), return_exceptions=True)

        try:
            paused = await self._or_quarantine(serving, pause, "pause", push.deadline)
        except BaseException:
            # Some of them may be paused.
            await finish(resume_all(), within_s=self._confirm_s, name="resume")
            raise
        try:
            await self._push(paused, push)
        finally:
            # With a separate deadline: a replica that stays paused serves no requests.
            await self._or_quarantine(paused, self._resume_one, "resume", Deadline(self._request_s, "resume"))

    async def _push(self, serving: Sequence[int], push: _Push) -> None:
        publication, location = push.publication, push.location
        info = (
            update_message(publication, "directory", path=location)
            if self._transport is None
            else self._transport.update_info(publication, location)
        )
        info.adapter = self._adapters.get(location)
        # The trainer computes the digest once. A replica checks bytes that arrive in host memory (a network file system or a
        # network can damage them) before it loads them. Tensors in shared GPU memory are not copied to the host for that, and
        # the trainer could free them while a replica still reads: there the replica digests the loaded weights afterwards.
        dtype = self._dtypes.get(location) if self._check_digest and info.backend == "cuda_ipc" else None

        async def update(index: int) -> None:
            began = time.monotonic()
            if self._group is None:
                await push.check_fence()
                await self._server_api.update(self._replicas[index], info)
            await self._server_api.require(self._replicas[index], publication, dtype=dtype)
            if isinstance(self._transport, SharingTransport):
                self._transport.add_copy(location, self._urls[index])
            self._longest_update_s = max(self._longest_update_s, time.monotonic() - began)
            if index in self._on_probation:
                self._on_probation.discard(index)
                WAITS.recovered(_loading(self._urls[index]))
                if self._log is not None:
                    self._log.info("policy.replica_back", url=self._urls[index])

        if self._group is not None:
            serving = await self._send_to_group(self._group, serving, info, push)
        await self._or_quarantine(serving, update, f"publication {publication.id}", push.deadline)

    async def _send_to_group(
        self, group: WeightGroup, serving: Sequence[int], info: UpdateInfo, push: _Push
    ) -> Sequence[int]:
        """Send to all members at once. If one is gone, the replicas that still respond form the next group."""
        members = list(serving)
        limit = _FailureLimit(", ".join(self._urls[index] for index in serving), "a weight update", absent_s=None)

        async def attempt() -> list[int]:
            try:
                async with self._one_attempt(push.deadline, "weight group"):
                    await push.check_fence()
                    await group.send([self._replicas[index] for index in members], info, push.location)
            except TransientError as error:
                limit.check(error)
                responses = await asyncio.gather(*map(self._responds, members))
                # If none responds, no single replica is at fault: the next attempt includes all of them again.
                members[:] = [index for index, ok in zip(members, responses, strict=True) if ok] or members
                raise
            return members

        sent = await retry(attempt, on=TransientError, deadline=push.deadline, on_retry=self._log_retry)
        self._quarantine(set(serving) - set(sent), "it left the weight group")
        return sent

    async def _or_quarantine(
        self, replicas: Sequence[int], operation: Operation[None], name: str, deadline: Deadline
    ) -> list[int]:
        """Run at every replica. Those that fail while others succeed are quarantined. Returns the successful ones.

        Raises if all fail, or if an error is not transient. A replica that would fail every time is no reason to stop the others.
        """
        unless_gone = self._unless_gone(operation)
        tasks = [asyncio.create_task(self._with_retry(unless_gone, index, name, deadline)) for index in replicas]
        on_probation = {task for task, index in zip(tasks, replicas, strict=True) if index in self._on_probation}
        try:
            await self._wait_for_stragglers(tasks, on_probation)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        failed: dict[int, TransientError | UpdateFailsError] = {}
        for index, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                late = f"{name} at {self._urls[index]} took too long: another replica has finished"
                failed[index] = TransientError(late)
            elif isinstance(outcome, TransientError | UpdateFailsError):
                failed[index] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if len(failed) == len(replicas):
            raise min(failed.values(), key=lambda error: not isinstance(error, UpdateFailsError))
        for index, error in failed.items():
            self._quarantine({index}, str(error))
        return [index for index in replicas if index not in failed]

    def _unless_gone(self, operation: Operation[T]) -> Operation[T | None]:
        """A server that is lost leaves the list when its lease ends. Do not wait for it any longer: the result is None."""
        tried: set[int] = set()

        async def attempt(index: int) -> T | None:
            if index in tried:
                await self._follow_source()
                if index in self._gone:
                    return None
            tried.add(index)
            return await operation(index)

        return attempt

    async def _wait_for_stragglers(
        self, tasks: Collection["asyncio.Task[Any]"], on_probation: Collection["asyncio.Task[Any]"]
    ) -> None:
        """Wait until all have ended, or `confirm_s` after the first success. Before that, no single replica is at fault.

        Replicas on probation get less time: a machine with a full disk must not delay every publication by `confirm_s`, and one
        that was restarted needs about as long as the others.
        """
        ended, waiting = set[asyncio.Task[Any]](), set(tasks)
        while waiting and all(isinstance(task.exception(), TransientError | UpdateFailsError) for task in ended):
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended |= more
        if waiting - set(on_probation):
            await asyncio.wait(waiting - set(on_probation), timeout=self._confirm_s)
        if waiting & set(on_probation):
            allowed_s = PROBATION_S + PROBATION_FACTOR * self._longest_update_s
            await asyncio.wait(waiting & set(on_probation), timeout=min(allowed_s, self._confirm_s))

    async def _at_all(self, replicas: Sequence[int], operation: Operation[T], name: str) -> list[T]:
        """Run at every replica concurrently, within one deadline. Raises the first error after all have ended."""
        deadline = Deadline(self._request_s, name)
        outcomes = await asyncio.gather(
            *(self._with_retry(operation, index, name, deadline) for index in replicas), return_exceptions=True
        )
        return results_of(outcomes)

    async def _with_retry(self, operation: Operation[T], index: int, name: str, deadline: Deadline) -> T:
        is_known = index in self._responded
        limit = _FailureLimit(self._urls[index], name, absent_s=None if is_known else self._absent_s)

        async def attempt() -> T:
            try:
                async with self._one_attempt(deadline, f"{name} at {self._urls[index]}"):
                    result = await operation(index)
            except TransientError as error:
                limit.check(error)
                raise
            self._responded.add(index)
            return result

        return await retry(attempt, on=TransientError, deadline=deadline, on_retry=self._log_retry)

    @asynccontextmanager
    async def _one_attempt(self, deadline: Deadline, name: str) -> AsyncIterator[None]:
        """Limit one attempt to `confirm_s`, so that a request without a response is retried."""
        try:
            async with deadline.limit(name, at_most_s=self._confirm_s):
                yield
        except DeadlineExceededError as error:
            raise TransientError(str(error)) from error
        except EpisodeError as error:
            # A 400 response here means wrong weights or a wrong configuration; a retry does not help.
            raise RunError(f"{name} was refused: {error}") from error

    def _quarantine(self, replicas: Collection[int], cause: str) -> None:
        for index in replicas:
            self._quarantined.add(index)
            is_new = index not in self._on_probation
            self._on_probation.add(index)
            WAITS.failing(_loading(self._urls[index]), cause, at_once=True)
            if self._log is not None and is_new:
                self._log.warning("policy.replica_quarantined", url=self._urls[index], cause=cause)

    def _log_retry(self, error: Exception, wait_s: float) -> None:
        """Warn about the first retry of a push only; one that lasts is reported to the supervisor."""
        WAITS.failing(PUSH, str(error))
        if self._log is not None:
            log = self._log.info if self._has_warned else self._log.warning
            log("policy.push_retried", cause=str(error), wait_s=round(wait_s, 3))
            self._has_warned = True


def _loading(url: str) -> str:
    return f"{url} to load weights (it gets no requests until then)"


def _weight_group(transport: WeightTransport | None, server_api: WeightServerApi) -> WeightGroup | None:
    """None: the transport needs no process group."""
    if not isinstance(transport, GroupTransport):
        return None
    if not isinstance(server_api, GroupServerApi):
        raise RunError("these policy servers join no process group; remove inference.transfer, or set it to 'auto'")
    return WeightGroup(transport, server_api)
