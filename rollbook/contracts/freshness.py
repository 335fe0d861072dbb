"""The one place where lag is computed, used by admission (`capacity`) and batch forming (`is_fresh`, `choose`).

Pure functions of numbers: the ledger and the rollout workers call them in a run, `simulation` in a predicted one.

Batch s is trained on version s-1, so a token sampled by version q has lag (s-1) - q. The lag of a group is that of its oldest
trained token. Symbols: P groups per step, n samples per group, C groups in flight, O the staleness bound, S <= O the part of it
that admission may use, W the window within which a younger group may overtake an older one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from rollbook.contracts.group import GroupId

SAME_MOMENT_S = 0.05
"""Samples that finish within this time are submitted in one part. Short against an episode, and long enough that episodes of equal
length do not make a part each."""


class BatchPolicy(StrEnum):
    WAIT = "wait"
    """Take groups in order of admission, within a window. Drops nothing in steady state; slow tasks are trained too."""
    DROP = "drop"
    """Take groups in order of arrival and drop stale ones. Fast, but slow tasks may never be trained."""
    TRIM = "trim"
    """Take groups in order of admission without waiting for slower ones, and mask the tokens that are too old."""
    PARTS = "parts"
    """Like `trim`, for groups that are submitted in parts: no sample waits for the slowest one of its group."""

    @property
    def masks_tokens(self) -> bool:
        """Whether tokens beyond the staleness bound are masked; otherwise a group with such a token is not trained at all."""
        return self in (BatchPolicy.TRIM, BatchPolicy.PARTS)


class AdmissionShare(StrEnum):
    """How much of the staleness bound O admission uses, with policy `wait` and O > 2. Otherwise it uses the whole bound."""

    HALF = "half"
    """S = ceil(O / 2): a slow group delays nothing until younger groups have used up the other half by overtaking it."""
    WHOLE = "whole"
    """S = O, the formula of published asynchronous recipes: more groups may start, and none may overtake a slow one."""


def lag(*, step: int, oldest_version: int) -> int:
    """Lag, in steps, of a group in batch `step` whose oldest trained token was sampled by version `oldest_version`."""
    return (step - 1) - oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCounts:
    """The numbers that the gate depends on: of groups, or, with policy `parts`, of samples.

    `leased` are being played, `waiting` need another attempt.
    """

    leased: int = 0
    waiting: int = 0
    queued: int = 0
    batches_decided: int = 0
    aged: int = 0
    """Those among leased and waiting that were admitted more than O versions ago. Only with policies that mask tokens."""

    @property
    def running(self) -> int:
        return self.leased + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessRule:
    """The staleness bound and how admission and batch forming share it."""

    groups_per_step: int
    max_in_flight: int
    max_head_offpolicy_versions: int
    policy: BatchPolicy = BatchPolicy.WAIT
    max_steps: int | None = None
    """The run ends after this many steps, so groups beyond the last batch are not admitted."""
    samples_per_group: int = 1
    """Episodes of one draw, n in formulas. Only policy `parts` uses it."""
    quorum: int | None = None
    """With policy `parts`: the first part is submitted when this many samples are scored. None: all of them."""
    admission_share: AdmissionShare = AdmissionShare.HALF

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}; a step needs at least one group")
        if self.max_head_offpolicy_versions < 0:
            raise ValueError(
                f"max_head_offpolicy_versions is {self.max_head_offpolicy_versions}; "
                "it must be >= 0 (0 is strictly synchronous)"
            )
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight is {self.max_in_flight}; it must be >= 1")
        if self.samples_per_group < 1:
            raise ValueError(f"samples_per_group is {self.samples_per_group}; it must be >= 1")
        lowest = min(2, self.samples_per_group)
        if self.quorum is not None and not lowest <= self.quorum <= self.samples_per_group:
            raise ValueError(
                f"quorum is {self.quorum}; it must be between {lowest} and the {self.samples_per_group} samples of a group"
            )

    @property
    def unit(self) -> int:
        """What the gate counts for one group: its samples with policy `parts`, otherwise 1."""
        return self.samples_per_group if self.policy is BatchPolicy.PARTS else 1

    @property
    def batch_size(self) -> int:
        """Size of a full batch in units. With policy `parts` it may be up to n - 1 samples larger, since a part is never split."""
        return self.groups_per_step * self.unit

    @property
    def admission_bound(self) -> int:
        """S: the part of the bound that admission may use. With `wait`, the rest is for overtaking."""
        bound = self.max_head_offpolicy_versions
        is_halved = self.policy is BatchPolicy.WAIT and self.admission_share is AdmissionShare.HALF and bound > 2
        return (bound + 1) // 2 if is_halved else bound

    @property
    def window(self) -> int:
        """W: the largest window for which S + ceil((W-1)/P) <= O."""
        return (self.max_head_offpolicy_versions - self.admission_bound) * self.groups_per_step + 1

    def oldest_allowed(self, step: int) -> int:
        """The oldest version that batch `step` may contain."""
        return (step - 1) - self.max_head_offpolicy_versions

    def cut(self, step: int) -> int | None:
        """Tokens of a lower effective version are masked in batch `step`; None if the policy masks no tokens."""
        return self.oldest_allowed(step) if self.policy.masks_tokens else None

    def is_fresh(self, *, step: int, oldest_version: int) -> bool:
        return oldest_version >= self.oldest_allowed(step)

    def capacity(self, counts: GateCounts, *, version: int) -> int:
        """New groups that may start now: min(C - leased, (S + v + 1)*P - (accepted + running - aged)), at least 0.

        accepted = P * batches decided + queued. Dropped groups do not count. With policy `parts` all terms are samples. A group
        then starts if a sample is missing, even if there is not room for all of its samples: otherwise a batch that lacks fewer
        samples than a group has would never be filled.
        """
        allowed = (self.admission_bound + version + 1) * self.batch_size
        if self.max_steps is not None:
            allowed = min(allowed, self.max_steps * self.batch_size)
        taken = self.batch_size * counts.batches_decided + counts.queued + counts.running - counts.aged
        wanted = -((taken - allowed) // self.unit)
        return max(0, min(self.free_slots(counts), wanted))

    def free_slots(self, counts: GateCounts) -> int:
        """Groups that could be played in addition, by C alone."""
        return (self.max_in_flight * self.unit - counts.leased) // self.unit

    def retry_capacity(self, counts: GateCounts) -> int:
        """Waiting groups that may be attempted again; with policy `parts`, samples of waiting parts.

        They are already counted in `capacity` and only need a slot under C.
        """
        return max(0, min(counts.waiting, self.max_in_flight * self.unit - counts.leased))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The fields of a queued group that the choice depends on."""

    group_id: GroupId
    sequence: int
    arrival: int
    oldest_version: int | None
    newest_version: int | None = None
    part: int = 1
    is_external: bool = False
    """Its producer never registered: it gets the places that granted groups leave."""
    size: int = 1
    """What it counts in a batch: 1, or its samples with policy `parts`."""


def is_stale(candidate: Candidate, rule: FreshnessRule, *, step: int) -> bool:
    """Too old for batch `step`, and so for every later one. A group of unknown versions is never stale.

    A policy that masks tokens needs one fresh token, the others need all tokens to be fresh.
    """
    deciding = candidate.newest_version if rule.policy.masks_tokens else candidate.oldest_version
    return deciding is not None and not rule.is_fresh(step=step, oldest_version=deciding)


def choose(
    queued: Iterable[Candidate], *, oldest_dispatched: int | None, rule: FreshnessRule, step: int
) -> tuple[Candidate, ...]:
    """Groups for batch `step`, in the order they are taken: P of them, or as many parts as P groups have samples, or all.

    `oldest_dispatched` is the lowest admission sequence that is still being played or waits for another attempt.
    """
    fresh = [candidate for candidate in queued if not is_stale(candidate, rule, step=step)]
    if rule.policy is BatchPolicy.DROP:
        return tuple(sorted(fresh, key=lambda c: (c.is_external, c.arrival))[: rule.groups_per_step])
    by_admission = sorted(fresh, key=lambda c: (c.is_external, c.sequence, c.part))
    if rule.policy.masks_tokens:
        sizes = accumulate((candidate.size for candidate in by_admission), initial=0)
        return tuple(
            candidate for candidate, before in zip(by_admission, sizes, strict=False) if before < rule.batch_size
        )
    # A group may be less than W above the oldest one that is still played. That one is the same for each pick: a window over the
    # first W open groups would slide with every pick and let a young group overtake without bound.
    within = [c for c in by_admission if oldest_dispatched is None or c.sequence < oldest_dispatched + rule.window]
    return tuple(within[: rule.groups_per_step])


def is_part_complete(*, part: int, scorable: int, quorum: int) -> bool:
    """Whether the finished samples are submitted without waiting for the others of the group."""
    return part > 1 or scorable >= quorum


def default_quorum(samples_per_group: int) -> int:
    """Three quarters of a group."""
    return -(-3 * samples_per_group // 4)
