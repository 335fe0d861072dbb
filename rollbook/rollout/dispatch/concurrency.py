"""Adaptive concurrency: how many groups to play at the same time. Pure.

Once the engine is full, more episodes only wait and their tokens grow stale. The number of groups that fills the engine depends on
the model, the length of responses and the environment, so it is found by hill climbing: the limit rises while throughput rises
with it, and falls while throughput does not suffer. Only rounds in which this limit held groups back are used.
"""

from dataclasses import dataclass

STEP_RATIO = 0.25
"""Relative change of the limit in one move."""
MIN_GAIN_RATIO = 0.4
"""Throughput that a move up must gain, relative to its size: 25 % more groups must give at least 10 % more tokens a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A measurement with one limit."""

    limit: int
    tokens: float
    seconds: float
    was_full: bool
    """Whether the limit held groups back for most of the round."""

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class ConcurrencyController:
    """Chooses the limit of the next round from the last two, within `least` and `most`."""

    def __init__(self, *, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"least is {least} and most is {most}; 1 <= least <= most must hold")
        self._least = least
        self._most = most
        self.limit = min(most, 2 * least)
        self._previous: Round | None = None
        self._direction = 1

    def next_limit(self, done: Round) -> int:
        if not done.was_full or done.seconds <= 0:
            # Something else was the limit: this round says nothing about ours.
            self._previous = None
            return self.limit
        previous, self._previous = self._previous, done
        if previous is not None and previous.limit != done.limit and previous.throughput > 0:
            change = done.limit / previous.limit - 1.0
            gain = done.throughput / previous.throughput - 1.0
            self._direction = 1 if gain / change >= MIN_GAIN_RATIO else -1
        move = max(1, round(done.limit * STEP_RATIO))
        self.limit = max(self._least, min(self._most, done.limit + self._direction * move))
        if self.limit == done.limit:
            # At a bound: try the other direction next, or a change of the engine would never be noticed.
            self._direction = -self._direction
        return self.limit


class RoundMeter:
    """Measures one round. It lasts until the groups in flight were replaced about twice, and at least `least_s`."""

    def __init__(self, *, least_s: float) -> None:
        self._least_s = least_s
        self._began: float | None = None
        self._groups = 0
        self._tokens = 0.0
        self._full = 0

    def add_group(self, *, tokens: float, was_full: bool, now: float) -> None:
        if self._began is None:
            # The first group only starts the clock: most of its tokens were sampled before.
            self._began = now
            return
        self._groups += 1
        self._tokens += tokens
        self._full += was_full

    def finish_round(self, *, limit: int, now: float) -> Round | None:
        """The round, if it is long enough; then the next one starts."""
        if self._began is None or self._groups < max(4, 2 * limit) or now - self._began < self._least_s:
            return None
        done = Round(
            limit=limit, tokens=self._tokens, seconds=now - self._began, was_full=self._full * 2 > self._groups
        )
        self._began, self._groups, self._tokens, self._full = None, 0, 0.0, 0
        return done
