"""Several replicas of the policy: their state, and the choice of one for each request.

The decisions are pure (`replica_choice`); this module keeps their inputs up to date. A single replica is not polled. The
list of replicas may change while the run is running. A replica keeps its index: one that is gone stays in the list, unused, and
may return.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import TransientError
from rollbook.inference.client.replica_choice import (
    AFFINITY_SPREAD,
    CircuitState,
    ReplicaCircuit,
    ReplicaView,
    choose_replica,
)
from rollbook.inference.client.server_protocol import ReplicaStatus, ServerProtocol
from rollbook.inference.connection import PolicyConnection, ReplicaBusyError, open_connection
from rollbook.telemetry.events import EventLog

ReplicaSource = Callable[[], Awaitable[Sequence[str]]]
"""The URLs of all replicas now. Raises `TransientError` when they are not known."""
QUARANTINE_AFTER_S = 5.0
"""Replicas load a publication within moments of each other. One that is behind for longer has missed it."""


class Replica:
    """One server, as this process knows it."""

    def __init__(self, connection: PolicyConnection) -> None:
        self.connection = connection
        self.circuit = ReplicaCircuit()
        self.in_flight = 0
        self.completed = 0
        self.is_gone = False
        self.behind_since: float | None = None
        """Since when it reports older weights than another replica."""
        self._status: ReplicaStatus | None = None
        self._in_flight_at_status = 0

    @property
    def url(self) -> str:
        return self.connection.url

    @property
    def publication(self) -> int | None:
        return None if self._status is None else self._status.publication

    def set_status(self, status: ReplicaStatus) -> None:
        self._status, self._in_flight_at_status = status, self.in_flight

    def view(self, now: float) -> ReplicaView:
        # The reported load of other processes, plus what this process has in flight now.
        others = 0 if self._status is None else max(0, self._status.load - self._in_flight_at_status)
        return ReplicaView(
            name=self.url,
            load=others + self.in_flight,
            publication=self.publication,
            is_behind=self.behind_since is not None and now - self.behind_since >= QUARANTINE_AFTER_S,
            is_broken=not self.circuit.allows(now),
            is_draining=self._status is not None and self._status.is_draining,
            is_gone=self.is_gone,
        )


class Fleet:
    """Made by `open_fleet`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        protocol: ServerProtocol,
        *,
        spread: float = AFFINITY_SPREAD,
        clock: Clock | None = None,
        log: EventLog | None = None,
        source: ReplicaSource | None = None,
        connect: Callable[[str], Awaitable[PolicyConnection]] | None = None,
    ) -> None:
        """`source` lists the replicas now; `connect` opens a connection to a new one."""
        self.replicas = list(replicas)
        self._source = source
        self._connect = connect
        self.protocol = protocol
        self._spread = spread
        self._clock = clock or SystemClock()
        self._log = log

    @property
    def urls(self) -> str:
        return ", ".join(replica.url for replica in self.replicas if not replica.is_gone)

    def choose(self, *, session: str | None, min_publication: int, avoid: Collection[int] = ()) -> int:
        if len(self.replicas) == 1:
            return 0
        now = self._clock.now()
        views = [replica.view(now) for replica in self.replicas]
        return choose_replica(views, session=session, min_publication=min_publication, avoid=avoid, spread=self._spread)

    @contextmanager
    def request(self, at: int) -> Iterator[PolicyConnection]:
        """Counts a request to a replica and records its outcome."""
        replica = self.replicas[at]
        replica.in_flight += 1
        replica.circuit.start_request(self._clock.now())
        try:
            yield replica.connection
        except ReplicaBusyError:
            # A full queue or old weights are a valid response: the circuit is not affected.
            raise
        except TransientError:
            self._record_failure(replica)
            raise
        else:
            self._record_success(replica)
            replica.completed += 1
        finally:
            replica.in_flight -= 1

    async def watch(self, *, interval_s: float) -> None:
        """Poll the status of every replica, and the list of replicas.

        Takes:  the list, where it may change; status reports of the replicas.
        Gives:  their load, publication and readiness, to `choose`.
        Waits:  `interval_s` between polls.
        Ends:   on cancellation.
        """
        while True:
            await self._follow_source()
            present = [replica for replica in self.replicas if not replica.is_gone]
            await asyncio.gather(*(self._poll(replica, within_s=max(1.0, interval_s)) for replica in present))
            newest = max((replica.publication or 0 for replica in present), default=0)
            now = self._clock.now()
            for replica in present:
                is_behind = replica.publication is not None and replica.publication < newest
                replica.behind_since = (replica.behind_since or now) if is_behind else None
            await self._clock.sleep(interval_s)

    async def _follow_source(self) -> None:
        """Connect to replicas that joined, and use those that left no longer."""
        if self._source is None or self._connect is None:
            return
        try:
            urls = {url.rstrip("/") for url in await self._source()}
        except TransientError as error:
            if self._log:
                self._log.warning("policy.replica_list_unknown", cause=str(error))
            return
        for url in sorted(urls - {replica.url for replica in self.replicas}):
            self.replicas.append(Replica(await self._connect(url)))
            if self._log:
                self._log.info("policy.replica_joined", url=url)
        for replica in self.replicas:
            if replica.is_gone != (replica.url not in urls):
                replica.is_gone = not replica.is_gone
                if self._log:
                    self._log.info(
                        "policy.replica_left" if replica.is_gone else "policy.replica_returned", url=replica.url
                    )

    async def _poll(self, replica: Replica, *, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                replica.set_status(await self.protocol.status(replica.connection))
        except (TransientError, TimeoutError):
            self._record_failure(replica)
        else:
            self._record_success(replica)

    def _record_failure(self, replica: Replica) -> None:
        now = self._clock.now()
        was_closed = replica.circuit.state(now) is CircuitState.CLOSED
        replica.circuit.record_failure(now)
        if was_closed and replica.circuit.state(now) is CircuitState.OPEN and self._log:
            self._log.warning("policy.replica_circuit_opened", url=replica.url)

    def _record_success(self, replica: Replica) -> None:
        if replica.circuit.state(self._clock.now()) is not CircuitState.CLOSED and self._log:
            self._log.info("policy.replica_circuit_closed", url=replica.url)
        replica.circuit.record_success()


@asynccontextmanager
async def open_fleet(
    urls: Sequence[str],
    protocol: ServerProtocol,
    *,
    max_connections: int,
    watch_s: float,
    spread: float = AFFINITY_SPREAD,
    api_key: str | None = None,
    log: EventLog | None = None,
    source: ReplicaSource | None = None,
) -> AsyncIterator[Fleet]:
    """`source` lists the replicas, where the list may change; `urls` are those at the start."""
    if not urls:
        raise ValueError("a fleet needs at least one policy server")
    async with AsyncExitStack() as stack:

        async def connect(url: str) -> PolicyConnection:
            opened = open_connection(url, max_connections=max_connections, api_key=api_key)
            return await stack.enter_async_context(opened)

        replicas = [Replica(await connect(url)) for url in urls]
        stack.push_async_callback(protocol.close)
        fleet = Fleet(replicas, protocol, spread=spread, log=log, source=source, connect=connect)
        if len(urls) == 1 and source is None:
            yield fleet
            return
        watcher = asyncio.create_task(fleet.watch(interval_s=watch_s), name="policy.watch_replicas")
        try:
            yield fleet
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
