"""Which groups form the next batch. Pure: it sees candidates and numbers, never a clock or a version that happens to be live."""

from collections.abc import Iterable, Sequence
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
