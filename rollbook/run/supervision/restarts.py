"""May a process that died be started again, and when? Pure: no clock, no process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """Restart with growing waits; give up on a process that keeps dying young.

    A life of `healthy_s` or more clears the record: a machine that loses a process every few minutes heals for ever, one whose
    process cannot stand up stops with the cause.
    """

    most_quick_deaths: int = 6
    most_stillbirths: int = 2
    """Deaths of a process that was never ready, in any of its lives: it cannot stand up, and waiting will not help."""
    healthy_s: float = 15.0
    first_wait_s: float = 0.2
    most_wait_s: float = 5.0

    def decide(self, lives_s: list[float], *, was_ready: bool = True) -> Restart | GiveUp:
        """`lives_s`: how long each incarnation lived, oldest first; the last one has just died. `was_ready`: one of them was."""
        if not was_ready and len(lives_s) > self.most_stillbirths:
            return GiveUp(f"it died {len(lives_s)} times before it was ready")
        quick = 0
        for life in reversed(lives_s):
            if life >= self.healthy_s:
                break
            quick += 1
        if quick > self.most_quick_deaths:
            return GiveUp(f"it died {quick} times in a row within {self.healthy_s:g} s of its start")
        # The first death of a healthy process is answered almost at once.
        return Restart(min(self.most_wait_s, self.first_wait_s * 2 ** max(0, quick - 1)))
