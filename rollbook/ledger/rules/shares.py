"""How the places of a batch are shared between producers: pure functions, independent of time and of live versions.

Minimum shares of registered producers come first (`reserved_places`), then the groups that the gate granted, by the run's policy,
then groups of producers that never registered (`contracts.freshness.choose`). The remaining places go to the registered producer
with the most credit (`share_places`). A producer without ready groups neither delays a batch nor gains credit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The fields of a registered producer that its share depends on."""

    name: str
    weight: float
    min_share: float
    credit: float
    ready: int
    """Number of its queued groups, or of their samples with policy `parts`, counted up to the size of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Places of each producer, and its credit afterwards."""

    places: Mapping[str, int]
    credits: Mapping[str, float]


def reserved_places(backlogs: Iterable[Backlog], *, batch_size: int) -> dict[str, int]:
    """Whole places of a batch reserved for minimum shares, never more than a producer's ready groups.

    Shares that add up to more than 1 are scaled down together.
    """
    backlogs = sorted(backlogs, key=lambda b: b.name)
    requested = sum(b.min_share for b in backlogs if b.ready)
    scale = min(1.0, 1.0 / requested) if requested else 0.0
    # 1e-9 absorbs float error.
    return {b.name: min(b.ready, int(batch_size * b.min_share * scale + 1e-9)) for b in backlogs}


def share_places(backlogs: Sequence[Backlog], *, places: int, batch_size: int) -> Shares:
    """Divide `places` of a batch among producers with ready groups: minimum shares first, then by credit.

    Every ready producer earns its weight's part of the places; each group taken costs one. So over many batches each gets its
    part, even if a single batch deviates. A producer without ready groups has no credit: absence does not accumulate.
    """
    ready = [b for b in sorted(backlogs, key=lambda b: b.name) if b.ready > 0]
    total = sum(b.weight for b in ready)
    taken = {b.name: 0 for b in backlogs}
    owed = {b.name: 0.0 for b in backlogs}
    to_give = min(places, sum(b.ready for b in ready))
    for b in ready:
        owed[b.name] = b.credit + to_give * b.weight / total
    left = to_give
    for name, entitled in reserved_places(ready, batch_size=batch_size).items():
        taken[name] = min(entitled, left)
        left -= taken[name]
    for _ in range(left):
        open_to = [b for b in ready if taken[b.name] < b.ready]
        # Names break ties, so that the decision is deterministic.
        most = max(open_to, key=lambda b: (owed[b.name] - taken[b.name], b.weight, b.name))
        taken[most.name] += 1
    owed_after = {b.name: _bounded(owed[b.name] - taken[b.name], batch_size) if b.ready else 0.0 for b in backlogs}
    return Shares(places=taken, credits=owed_after)


def _bounded(credit: float, batch_size: int) -> float:
    """Credit is limited to one batch: a minimum share would otherwise build up a debt without limit."""
    return max(-float(batch_size), min(float(batch_size), credit))
