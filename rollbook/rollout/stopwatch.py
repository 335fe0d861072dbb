"""The time of one episode: only the seconds that the policy and the environment use.

Waiting in a queue (for an engine slot, a free sandbox, a server that restarts) does not count. It shows how busy the system is, and
limiting an episode by it would teach the policy about our hardware.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollbook.concurrency.clock import Clock, SystemClock


class Wait:
    """A wait in progress. The part of it that counts as episode time is charged when it is known."""

    def __init__(self) -> None:
        self.charged_s = 0.0

    def charge(self, seconds: float) -> None:
        # Of several concurrent requests only the longest counts.
        self.charged_s = max(self.charged_s, seconds)


class EpisodeTime:
    """`changed` is called whenever the clock stops or continues, so that a timeout can be rescheduled."""

    def __init__(self, seconds: float, *, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self.changed: Callable[[], None] = lambda: None
        self._clock = clock or SystemClock()
        self._started = self._clock.now()
        self._waited_s = 0.0
        self._depth = 0
        self._wait = Wait()
        self._wait_started = 0.0

    @property
    def is_stopped(self) -> bool:
        return self._depth > 0

    @property
    def used_s(self) -> float:
        now = self._wait_started if self.is_stopped else self._clock.now()
        return max(0.0, now - self._started - self._waited_s)

    @property
    def waited_s(self) -> float:
        """Seconds so far that did not count."""
        return self._waited_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - self.used_s)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        """Stop the clock inside the block. Charged seconds still count."""
        if self._depth == 0:
            self._wait, self._wait_started = Wait(), self._clock.now()
        self._depth += 1
        self.changed()
        try:
            yield self._wait
        finally:
            self._depth -= 1
            if self._depth == 0:
                took_s = self._clock.now() - self._wait_started
                self._waited_s += max(0.0, took_s - self._wait.charged_s)
            self.changed()


class MovableTimeout:
    """Expires `timeout` after `left_s` seconds. `move` reads `left_s` again and counts from then.

    A move to a later time is applied when the timer fires: an episode usually sets one timer for all its requests.
    """

    def __init__(self, timeout: asyncio.Timeout, left_s: Callable[[], float]) -> None:
        self._timeout = timeout
        self._left_s = left_s
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Callable[[], None]:
        self._until = self._loop.time() + self._left_s()
        self._timer = self._loop.call_at(self._until, self._fire)
        return self.move

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            # A cancelled timer keeps the context of its episode. Without this, only the garbage collector would free them.
            self._timer = None

    def move(self) -> None:
        self._until = self._loop.time() + self._left_s()
        if self._timer is not None and self._until < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self._until, self._fire)

    def _fire(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._fire)
        else:
            self._timeout.reschedule(self._until)
