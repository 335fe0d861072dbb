"""How many groups to play at the same time: as many as keep the engine busy, and not one more. Pure.

Beyond the point where the engine is full, further episodes finish nothing sooner: they only wait, and their tokens grow old. That
point moves with the model, the length of answers and the world, so it is sought: the number in flight climbs while throughput
climbs with it, and goes back down as long as throughput does not suffer. It never leaves the bounds it is given, and it only learns
from rounds in which it was really the limit (not the gate, not the end of the data).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRules:
    least: int
    most: int
    step_ratio: float = 0.25
    """How much the number moves at a time."""
    worth: float = 0.4
    """A step up must bring this part of its own size in throughput: +25 % in flight must bring +10 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What was measured while the limit stood still."""

    limit: int
    tokens: float
    seconds: float
    was_full: bool
    """Whether the limit was what held groups back, for most of the time."""

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class ConcurrencyController:
    """Hill climbing on the throughput. Told one round at a time; answers with the limit of the next."""

    def __init__(self, rules: AdaptiveRules) -> None:
        if not 1 <= rules.least <= rules.most:
            raise ValueError(f"least is {rules.least} and most is {rules.most}; 1 <= least <= most must hold")
        self._rules = rules
        self.limit = max(rules.least, min(rules.most, 2 * rules.least))
        self._before: Round | None = None
        self._direction = 1

    def after(self, done: Round) -> int:
        """The limit of the next round."""
        if not done.was_full or done.seconds <= 0:
            # Something else was the limit: nothing was learned about this one.
            self._before = None
            return self.limit
        before, self._before = self._before, done
        if before is not None and before.limit != done.limit and before.throughput > 0:
            moved = done.limit / before.limit - 1.0
            gained = done.throughput / before.throughput - 1.0
            # Worth it, seen from below: what the larger of the two numbers brought for its size.
            is_worth_it = gained / moved >= self._rules.worth
            self._direction = 1 if is_worth_it else -1
        self.limit = self._moved(done.limit, self._direction)
        if self.limit == done.limit:
            # At a bound: look from the other side next time, or it would never be learned that things changed.
            self._direction = -self._direction
        return self.limit

    def _moved(self, limit: int, direction: int) -> int:
        by = max(1, round(limit * self._rules.step_ratio))
        return max(self._rules.least, min(self._rules.most, limit + direction * by))


class RoundMeter:
    """Collects one round: long enough that the number in flight has turned over once since the limit moved."""

    def __init__(self, *, least_s: float) -> None:
        self._least_s = least_s
        self._began: float | None = None
        self._groups = 0
        self._tokens = 0.0
        self._full = 0

    def finished(self, *, tokens: float, was_full: bool, now: float) -> None:
        if self._began is None:
            self._began = now
            return  # the first one only starts the watch: when it began is not known
        self._groups += 1
        self._tokens += tokens
        self._full += was_full

    def take(self, *, limit: int, now: float) -> Round | None:
        """The round, if it is over; then the next one begins."""
        if self._began is None or self._groups < max(4, 2 * limit) or now - self._began < self._least_s:
            return None
        done = Round(
            limit=limit, tokens=self._tokens, seconds=now - self._began, was_full=self._full * 2 > self._groups
        )
        self._began, self._groups, self._tokens, self._full = None, 0, 0.0, 0
        return done
