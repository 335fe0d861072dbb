"""The seconds of one episode: only those that the policy and its world use.

Waiting for a place in a queue (an engine's slot, a free sandbox, a server that is being restarted) is not the episode's time: it
says how busy the system is, and an episode that is judged by it would teach the policy about our machines.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollbook.concurrency.clock import Clock, SystemClock


class Wait:
    """A wait that is going on. What of it was the episode's own doing is charged when that is known."""

    def __init__(self) -> None:
        self.charged_s = 0.0

    def charge(self, seconds: float) -> None:
        # Of several requests at a time the longest counts: they ran side by side.
        self.charged_s = max(self.charged_s, seconds)


class EpisodeTime:
    """`changed` is called when the clock stops or goes on, so that whoever guards the episode can set its alarm."""

    def __init__(self, seconds: float, *, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self.changed: Callable[[], None] = lambda: None
        self._clock = clock or SystemClock()
        self._began = self._clock.now()
        self._waited_s = 0.0
        self._depth = 0
        self._wait = Wait()
        self._wait_began = 0.0

    @property
    def is_stopped(self) -> bool:
        return self._depth > 0

    @property
    def used_s(self) -> float:
        now = self._wait_began if self.is_stopped else self._clock.now()
        return max(0.0, now - self._began - self._waited_s)

    @property
    def waited_s(self) -> float:
        """Seconds that were not the episode's own, so far."""
        return self._waited_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - self.used_s)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        """The clock stands still inside, apart from what is charged."""
        if self._depth == 0:
            self._wait, self._wait_began = Wait(), self._clock.now()
        self._depth += 1
        self.changed()
        try:
            yield self._wait
        finally:
            self._depth -= 1
            if self._depth == 0:
                took = self._clock.now() - self._wait_began
                self._waited_s += max(0.0, took - self._wait.charged_s)
            self.changed()
