"""Chooses the replica for a request, and which replicas may get one. Pure: no socket and no clock.

A session has a home replica, which holds the KV cache of its earlier turns. Rendezvous hashing assigns homes, so a replica that
leaves moves only its own sessions. A home that is much busier than another replica is skipped.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import xxhash

AFFINITY_SPREAD = 8
"""A home may have this many requests more than the least loaded replica: up to there a warm cache is worth more."""
FAILURES_TO_OPEN = 3
"""One lost connection may be chance; three in a row indicate a dead process."""
FIRST_OPEN_S = 0.5
MAX_OPEN_S = 15.0
"""A replica that returns after minutes is used again within this time."""


class ReplicaTier(IntEnum):
    """The order of preference. A worse tier is used only when no better replica is left."""

    IN_SERVICE = 0
    QUARANTINED = 1
    """Its weights are older than those of other replicas, or than the request requires."""
    BROKEN = 2
    """Its circuit is open."""
    DRAINING = 3
    GONE = 4
    """It is no longer in the list of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """The known state of one replica."""

    name: str
    load: float
    """Requests running or queued there, as far as is known."""
    publication: int | None = None
    """None: never reported."""
    is_behind: bool = False
    """Other replicas have had newer weights for a while."""
    is_broken: bool = False
    is_draining: bool = False
    is_gone: bool = False

    def tier(self, min_publication: int) -> ReplicaTier:
        if self.is_gone:
            return ReplicaTier.GONE
        if self.is_draining:
            return ReplicaTier.DRAINING
        if self.is_broken:
            return ReplicaTier.BROKEN
        if self.is_behind or (self.publication is not None and self.publication < min_publication):
            return ReplicaTier.QUARANTINED
        return ReplicaTier.IN_SERVICE


def choose_replica(
    replicas: Sequence[ReplicaView],
    *,
    session: str | None = None,
    min_publication: int = 0,
    avoid: Collection[int] = (),
    spread: float = AFFINITY_SPREAD,
) -> int:
    """The index of the replica. `avoid`: replicas that failed this request before; used again only when all of them have."""
    if not replicas:
        raise ValueError("the fleet has no replica")
    ranks = [
        (at in avoid and len(avoid) < len(replicas), view.tier(min_publication)) for at, view in enumerate(replicas)
    ]
    best = min(ranks)
    candidates = [at for at, rank in enumerate(ranks) if rank == best]
    least = min(replicas[at].load for at in candidates)
    if session is None:
        return min(candidates, key=lambda at: replicas[at].load)
    home = max(candidates, key=lambda at: rendezvous_weight(session, replicas[at].name))
    if replicas[home].load <= least + spread:
        return home
    return min(candidates, key=lambda at: (replicas[at].load, -rendezvous_weight(session, replicas[at].name)))


def rendezvous_weight(session: str, name: str) -> int:
    """The replica with the highest weight is the home of the session."""
    return int(xxhash.xxh3_64_intdigest(f"{session}\x00{name}".encode()))


def prompt_session(prompt_ids: Sequence[int], *, head: int = 32) -> str:
    """A session for a request that names none: prompts with the same start are likely to share cached prefixes."""
    return ",".join(map(str, prompt_ids[:head]))


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class ReplicaCircuit:
    """After several failures in a row a replica gets no requests for a while, then one probe.

    closed --failures--> open --time--> half open --success--> closed;  half open --failure--> open, for longer
    """

    def __init__(self) -> None:
        self._failures = 0
        self._open_s = FIRST_OPEN_S
        self._open_until: float | None = None
        self._probing_until: float | None = None

    def state(self, now: float) -> CircuitState:
        if self._open_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._open_until else CircuitState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """A half-open circuit allows one request at a time."""
        state = self.state(now)
        if state is CircuitState.HALF_OPEN:
            return self._probing_until is None or now >= self._probing_until
        return state is CircuitState.CLOSED

    def start_request(self, now: float) -> None:
        if self.state(now) is CircuitState.HALF_OPEN:
            # A probe that never ends must not block the replica forever.
            self._probing_until = now + MAX_OPEN_S

    def record_success(self) -> None:
        self._failures, self._open_s = 0, FIRST_OPEN_S
        self._open_until = self._probing_until = None

    def record_failure(self, now: float) -> None:
        self._failures += 1
        if self._open_until is not None and now >= self._open_until:
            self._open_s = min(MAX_OPEN_S, self._open_s * 2)
            self._open_until, self._probing_until = now + self._open_s, None
        elif self._open_until is None and self._failures >= FAILURES_TO_OPEN:
            self._open_until = now + self._open_s
