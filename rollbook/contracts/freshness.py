"""The one place where lag is computed, for both hands of the gate: admission (`capacity`) and batch forming (`is_fresh`).

Training batch s happens on version s-1, so the lag of a token that version q sampled is (s-1) - q. A group's lag is that of its
oldest trained token. Symbols as in the protocol: P groups a step, C groups in flight, O the staleness budget, S <= O the part of it
that admission may spend, W the window within which a younger group may overtake an older one.
"""

from dataclasses import dataclass
from enum import StrEnum


class BatchPolicy(StrEnum):
    WAIT = "wait"
    """Groups are taken in order of admission, within a window: nothing is dropped in steady state, slow tasks are trained too."""
    DROP = "drop"
    """Groups are taken in order of arrival; what is too old is dropped. Fast, but slow tasks are never trained."""


def lag(*, step: int, oldest_version: int) -> int:
    """Lag, in steps, of a group in batch `step` whose oldest trained token was sampled by version `oldest_version`."""
    return (step - 1) - oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCounts:
    """What the gate counts, always from rows. `leased` are being played, `waiting` need another attempt."""

    leased: int = 0
    waiting: int = 0
    queued: int = 0
    batches_decided: int = 0

    @property
    def running(self) -> int:
        return self.leased + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessRule:
    """The staleness budget and how it is spent."""

    groups_per_step: int
    max_in_flight: int
    budget: int
    policy: BatchPolicy = BatchPolicy.WAIT
    max_steps: int | None = None
    """The run ends after this many steps: no group is admitted that no batch could take."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}; a step needs at least one group")
        if self.budget < 0:
            raise ValueError(f"the lag budget is {self.budget}; it must be >= 0 (0 is strictly synchronous)")
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight is {self.max_in_flight}; at least one group must be playable")

    @property
    def gate_budget(self) -> int:
        """S: what admission may spend. Under `wait` the rest pays for overtaking."""
        if self.policy is BatchPolicy.DROP or self.budget <= 2:
            return self.budget
        return (self.budget + 1) // 2

    @property
    def window(self) -> int:
        """W: lag <= S + ceil((W-1)/P), so this W keeps it within the budget."""
        return (self.budget - self.gate_budget) * self.groups_per_step + 1

    def oldest_allowed(self, step: int) -> int:
        """The oldest version that batch `step` may contain."""
        return (step - 1) - self.budget

    def is_fresh(self, *, step: int, oldest_version: int) -> bool:
        return oldest_version >= self.oldest_allowed(step)

    def capacity(self, counts: GateCounts, *, version: int) -> int:
        """New groups that may begin now: min(C - leased, (S + v + 1)*P - (accepted + running)), never below 0.

        accepted = P * batches decided + queued. Dropped groups are in no term: rejecting one frees its place.
        """
        places = (self.gate_budget + version + 1) * self.groups_per_step
        if self.max_steps is not None:
            places = min(places, self.max_steps * self.groups_per_step)
        taken = self.groups_per_step * counts.batches_decided + counts.queued + counts.running
        return max(0, min(self.max_in_flight - counts.leased, places - taken))

    def retry_capacity(self, counts: GateCounts) -> int:
        """Waiting groups that may be attempted again: they kept their place in the gate and need only a free slot under C."""
        return max(0, min(counts.waiting, self.max_in_flight - counts.leased))
