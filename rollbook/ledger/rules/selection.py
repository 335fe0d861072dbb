"""Which groups form the next batch. Pure: it sees candidates and numbers, never a clock or a version that happens to be live.

Groups of the gate, and of producers that never registered, are chosen by the run's policy alone (`choose`). Registered producers
share places by weight (`share_places`): a minimum share comes first, then the policy's groups, then what is left goes to whoever is
owed most. A producer that has nothing ready never holds up a batch, and saves up nothing for later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A queued group, as far as choosing needs to know it."""

    group_id: GroupId
    sequence: int
    arrival: int
    oldest_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A registered producer, as far as sharing needs to know it."""

    name: str
    weight: float
    min_share: float
    credit: float
    ready: int
    """Its queued groups; more than a batch need not be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How many groups each producer gives, and what each is owed afterwards."""

    places: Mapping[str, int]
    credits: Mapping[str, float]


def reserved_places(backlogs: Iterable[Backlog], *, batch_size: int) -> dict[str, int]:
    """Places of a batch that minimum shares are entitled to now: whole ones, and never more than stand ready.

    Shares that add up to more than the whole are scaled down together.
    """
    backlogs = sorted(backlogs, key=lambda b: b.name)
    asked = sum(b.min_share for b in backlogs if b.ready)
    scale = min(1.0, 1.0 / asked) if asked else 0.0
    # A hair is added before rounding down: a tenth of ten is one, whatever binary fractions make of it.
    return {b.name: min(b.ready, int(batch_size * b.min_share * scale + 1e-9)) for b in backlogs}


def share_places(backlogs: Sequence[Backlog], *, places: int, batch_size: int) -> Shares:
    """Divide `places` of a batch among producers that have groups ready: minimum shares first, then by what each is owed.

    Every ready producer earns its weight's part of the places; each group taken costs one. So over many batches each gets its
    part, however the places of a single one come out. Who has nothing ready is owed nothing: absence is not saved up.
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
        # Names break a tie, so that deciding is the same wherever it happens.
        most = max(open_to, key=lambda b: (owed[b.name] - taken[b.name], b.weight, b.name))
        taken[most.name] += 1
    owed_after = {b.name: _bounded(owed[b.name] - taken[b.name], batch_size) if b.ready else 0.0 for b in backlogs}
    return Shares(places=taken, credits=owed_after)


def _bounded(credit: float, batch_size: int) -> float:
    """Nobody is owed, or owes, more than one batch: a minimum share would otherwise build up a debt that is never paid."""
    return max(-float(batch_size), min(float(batch_size), credit))


def is_stale(candidate: Candidate, rule: FreshnessRule, *, step: int) -> bool:
    """Too old for batch `step`, and so for every later one. A group of unknown versions is never judged."""
    oldest = candidate.oldest_version
    return oldest is not None and not rule.is_fresh(step=step, oldest_version=oldest)


def choose(
    queued: Iterable[Candidate], *, oldest_running: int | None, rule: FreshnessRule, step: int
) -> tuple[Candidate, ...]:
    """Up to P groups for batch `step`, in the order they are taken.

    `oldest_running` is the lowest admission sequence that is still being played or waits for another attempt.
    """
    fresh = [candidate for candidate in queued if not is_stale(candidate, rule, step=step)]
    if rule.policy is BatchPolicy.DROP:
        return tuple(sorted(fresh, key=lambda c: c.arrival)[: rule.groups_per_step])
    return tuple(_within_window(sorted(fresh, key=lambda c: c.sequence), oldest_running, rule))


def _within_window(
    by_sequence: Sequence[Candidate], oldest_running: int | None, rule: FreshnessRule
) -> Iterable[Candidate]:
    """The lowest sequence, again and again, while it lies less than W above the oldest open group.

    The oldest open group is looked up anew for each pick: a window over the first W open groups would slide with every pick and
    let a young group overtake without bound.
    """
    for lowest in by_sequence[: rule.groups_per_step]:
        oldest_open = lowest.sequence if oldest_running is None else min(lowest.sequence, oldest_running)
        if lowest.sequence >= oldest_open + rule.window:
            return
        yield lowest
