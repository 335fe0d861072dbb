"""May a process that died be restarted, and when? Pure: no clock, no process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """Restart with growing waits; give up on a process that repeatedly dies while it starts or soon after it is ready.

    An incarnation that is ready for `healthy_s` or longer resets the count, so a process that dies every few minutes is restarted
    for ever, and one that cannot start stops the run with its cause.
    """

    most_quick_deaths: int = 6
    most_failed_starts: int = 2
    """Deaths of a process of which no incarnation was ever ready: more restarts would not help."""
    healthy_s: float = 15.0
    first_wait_s: float = 0.2
    most_wait_s: float = 5.0

    def decide(self, lifetimes_s: list[float], *, was_ready: bool = True) -> Restart | GiveUp:
        """`lifetimes_s`: how long each incarnation was ready, oldest first; the last one has just died."""
        if not was_ready and len(lifetimes_s) > self.most_failed_starts:
            return GiveUp(f"it died {len(lifetimes_s)} times before it was ready")
        quick = 0
        for lifetime in reversed(lifetimes_s):
            if lifetime >= self.healthy_s:
                break
            quick += 1
        if quick > self.most_quick_deaths:
            return GiveUp(f"it died {quick} times in a row within {self.healthy_s:g} s of being ready")
        return Restart(min(self.most_wait_s, self.first_wait_s * 2 ** max(0, quick - 1)))
