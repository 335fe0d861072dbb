"""The one place where lag is computed, used by admission (`capacity`) and batch forming (`is_fresh`).

Batch s is trained on version s-1, so a token sampled by version q has lag (s-1) - q. The lag of a group is that of its oldest
trained token. Symbols: P groups per step, C groups in flight, O the staleness bound, S <= O the part of it that admission may use,
W the window within which a younger group may overtake an older one.
"""

from dataclasses import dataclass
from enum import StrEnum


class BatchPolicy(StrEnum):
    WAIT = "wait"
    """Take groups in order of admission, within a window. Drops nothing in steady state; slow tasks are trained too."""
    DROP = "drop"
    """Take groups in order of arrival and drop stale ones. Fast, but slow tasks may never be trained."""


def lag(*, step: int, oldest_version: int) -> int:
    """Lag, in steps, of a group in batch `step` whose oldest trained token was sampled by version `oldest_version`."""
    return (step - 1) - oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCounts:
    """The numbers of groups that the gate depends on. `leased` are being played, `waiting` need another attempt."""

    leased: int = 0
    waiting: int = 0
    queued: int = 0
    batches_decided: int = 0

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

    @property
    def admission_bound(self) -> int:
        """S: the part of the bound that admission may use. With `wait`, the rest is for overtaking."""
        bound = self.max_head_offpolicy_versions
        return bound if self.policy is BatchPolicy.DROP or bound <= 2 else (bound + 1) // 2

    @property
    def window(self) -> int:
        """W: the largest window for which S + ceil((W-1)/P) <= O."""
        return (self.max_head_offpolicy_versions - self.admission_bound) * self.groups_per_step + 1

    def oldest_allowed(self, step: int) -> int:
        """The oldest version that batch `step` may contain."""
        return (step - 1) - self.max_head_offpolicy_versions

    def is_fresh(self, *, step: int, oldest_version: int) -> bool:
        return oldest_version >= self.oldest_allowed(step)

    def capacity(self, counts: GateCounts, *, version: int) -> int:
        """New groups that may start now: min(C - leased, (S + v + 1)*P - (accepted + running)), at least 0.

        accepted = P * batches decided + queued. Dropped groups do not count.
        """
        allowed = (self.admission_bound + version + 1) * self.groups_per_step
        if self.max_steps is not None:
            allowed = min(allowed, self.max_steps * self.groups_per_step)
        taken = self.groups_per_step * counts.batches_decided + counts.queued + counts.running
        return max(0, min(self.max_in_flight - counts.leased, allowed - taken))

    def retry_capacity(self, counts: GateCounts) -> int:
        """Waiting groups that may be attempted again. They are already counted in `capacity` and only need a slot under C."""
        return max(0, min(counts.waiting, self.max_in_flight - counts.leased))
