"""Which replica answers next. Pure: a decision over what is known, with no socket and no clock.

A session has a home: the same replica each time, so that what it computed for the earlier turns is used again. Homes are spread by
rendezvous hashing, so one replica that leaves moves only its own sessions. Home gives way where it is clearly busier than another.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

SPREAD = 8
"""Requests that a home may have more than the least loaded replica. Below it, a warm cache is worth more than an even load."""


class Tier(IntEnum):
    """How willingly a replica is asked. A worse one is asked only where no better one is left: the server's own word is final."""

    IN_SERVICE = 0
    QUARANTINED = 1
    """It missed a publication: its weights are older than those of others, or than asked for."""
    BROKEN = 2
    """Its circuit is open: it failed several times in a row."""
    DRAINING = 3
    """It said that it will end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """What is known of one replica."""

    name: str
    load: float
    """Requests it has, as far as is known."""
    publication: int | None = None
    """None: never heard."""
    is_behind: bool = False
    """Others have newer weights, and have had them for a while."""
    is_broken: bool = False
    is_draining: bool = False

    def tier(self, min_publication: int) -> Tier:
        if self.is_draining:
            return Tier.DRAINING
        if self.is_broken:
            return Tier.BROKEN
        if self.is_behind or (self.publication is not None and self.publication < min_publication):
            return Tier.QUARANTINED
        return Tier.IN_SERVICE


def pick(
    replicas: Sequence[ReplicaView],
    *,
    session: str | None = None,
    min_publication: int = 0,
    avoid: Collection[int] = (),
    spread: float = SPREAD,
) -> int:
    """Index of the replica to ask. `avoid`: those that just failed this very request; asked again only when all have."""
    if not replicas:
        raise ValueError("there is no replica to ask")
    tiers = [
        (at in avoid and len(avoid) < len(replicas), view.tier(min_publication)) for at, view in enumerate(replicas)
    ]
    best = min(tiers)
    candidates = [at for at, tier in enumerate(tiers) if tier == best]
    least = min(replicas[at].load for at in candidates)
    if session is not None:
        home = max(candidates, key=lambda at: attraction(session, replicas[at].name))
        if replicas[home].load <= least + spread:
            return home
        return min(candidates, key=lambda at: (replicas[at].load, -attraction(session, replicas[at].name)))
    return min(candidates, key=lambda at: replicas[at].load)


def attraction(session: str, name: str) -> int:
    """How much a replica attracts a session. The strongest is its home."""
    return int(xxhash.xxh3_64_intdigest(f"{session}\x00{name}".encode()))


def prompt_session(prompt_ids: Sequence[int], *, head: int = 32) -> str:
    """A session for a request that names none: prompts that begin alike are likely to share what was computed for them."""
    return ",".join(map(str, prompt_ids[:head]))
