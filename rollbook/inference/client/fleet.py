"""Several replicas of the policy: who is in service, how loaded, how new; and which one is asked next.

The decisions are pure (`picking`, `breaker`); this file keeps what they decide upon up to date. With one replica there is nothing
to decide and nothing is polled.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.contracts.errors import TransientError
from rollbook.inference.client.circuit import Circuit, CircuitBreaker
from rollbook.inference.client.replica_choice import SPREAD, ReplicaView, attraction, pick
from rollbook.inference.client.server_protocol import Dialect, Sighting
from rollbook.inference.connection import PolicyConnection, ReplicaBusyError, open_connection
from rollbook.telemetry.events import EventLog

QUARANTINE_AFTER_S = 5.0
"""Replicas take up a publication within moments of each other. One that is behind for longer has missed it."""


class Replica:
    """One server as this process knows it."""

    def __init__(self, connection: PolicyConnection) -> None:
        self.connection = connection
        self.breaker = CircuitBreaker()
        self.in_flight = 0
        self.answered = 0
        self.behind_since: float | None = None
        """When it was first seen with older weights than another replica, and still is."""
        self._seen: Sighting | None = None
        self._in_flight_then = 0

    @property
    def url(self) -> str:
        return self.connection.url

    @property
    def publication(self) -> int | None:
        return None if self._seen is None else self._seen.publication

    def saw(self, sighting: Sighting) -> None:
        self._seen, self._in_flight_then = sighting, self.in_flight

    def view(self, now: float) -> ReplicaView:
        # What it said, with what this process has sent it since; other processes send to it, too.
        heard = 0 if self._seen is None else max(0, self._seen.load - self._in_flight_then)
        return ReplicaView(
            name=self.url,
            load=heard + self.in_flight,
            publication=self.publication,
            is_behind=self.behind_since is not None and now - self.behind_since >= QUARANTINE_AFTER_S,
            is_broken=not self.breaker.allows(now),
            is_draining=self._seen is not None and self._seen.is_draining,
        )


class Fleet:
    """Made by `open_fleet`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        dialect: Dialect,
        *,
        spread: float = SPREAD,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.replicas = tuple(replicas)
        self.dialect = dialect
        self._spread = spread
        self._clock = clock or SystemClock()
        self._log = log

    @property
    def urls(self) -> str:
        return ", ".join(replica.url for replica in self.replicas)

    def home(self, session: str | None) -> int:
        """Where a session belongs while every replica is well. Requests with one home may share a bundle."""
        if session is None or len(self.replicas) == 1:
            return 0
        return max(range(len(self.replicas)), key=lambda at: attraction(session, self.replicas[at].url))

    def choose(self, *, session: str | None, min_publication: int, avoid: Collection[int] = ()) -> int:
        if len(self.replicas) == 1:
            return 0
        now = self._clock.now()
        views = [replica.view(now) for replica in self.replicas]
        return pick(views, session=session, min_publication=min_publication, avoid=avoid, spread=self._spread)

    @contextmanager
    def asking(self, at: int) -> Iterator[PolicyConnection]:
        """Counts the request, and learns from how it ends."""
        replica = self.replicas[at]
        replica.in_flight += 1
        replica.breaker.began(self._clock.now())
        try:
            yield replica.connection
        except ReplicaBusyError:
            # It answered, and rightly: too full, or weights too old. Its circuit has nothing to do with that.
            raise
        except TransientError:
            self._failed(replica)
            raise
        else:
            self._succeeded(replica)
            replica.answered += 1
        finally:
            replica.in_flight -= 1

    async def watch(self, *, every_s: float) -> None:
        """Look at every replica again and again.

        Takes:  what replicas say of themselves.
        Gives:  their load, publication and readiness, to `choose`.
        Waits:  `every_s` between looks.
        Ends:   on cancellation.
        """
        while True:
            await asyncio.gather(*(self._look(replica, at_most_s=max(1.0, every_s)) for replica in self.replicas))
            self._note_who_is_behind()
            await self._clock.sleep(every_s)

    def _note_who_is_behind(self) -> None:
        newest = max((replica.publication or 0 for replica in self.replicas), default=0)
        now = self._clock.now()
        for replica in self.replicas:
            is_behind = replica.publication is not None and replica.publication < newest
            replica.behind_since = (replica.behind_since or now) if is_behind else None

    async def _look(self, replica: Replica, *, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                replica.saw(await self.dialect.look(replica.connection))
        except (TransientError, TimeoutError):
            self._failed(replica)
        else:
            self._succeeded(replica)

    def _failed(self, replica: Replica) -> None:
        before = replica.breaker.state(self._clock.now())
        replica.breaker.failed(self._clock.now())
        if before is Circuit.CLOSED and replica.breaker.state(self._clock.now()) is Circuit.OPEN and self._log:
            self._log.warning("policy.replica_left_out", url=replica.url, cause="several failures in a row")

    def _succeeded(self, replica: Replica) -> None:
        if replica.breaker.state(self._clock.now()) is not Circuit.CLOSED and self._log:
            self._log.info("policy.replica_back", url=replica.url)
        replica.breaker.succeeded()


@asynccontextmanager
async def open_fleet(
    urls: Sequence[str],
    dialect: Dialect,
    *,
    max_connections: int,
    watch_s: float,
    spread: float = SPREAD,
    api_key: str | None = None,
    log: EventLog | None = None,
) -> AsyncIterator[Fleet]:
    if not urls:
        raise ValueError("a fleet needs at least one policy server")
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(open_connection(url, max_connections=max_connections, api_key=api_key))
            for url in urls
        ]
        fleet = Fleet([Replica(connection) for connection in connections], dialect, spread=spread, log=log)
        if len(urls) == 1:
            yield fleet
            return
        watching = asyncio.create_task(fleet.watch(every_s=watch_s), name="policy.watch_replicas")
        try:
            yield fleet
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
