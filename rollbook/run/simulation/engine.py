"""A simulated replica: its requests progress at equal speed, which depends on how many there are."""

import heapq
import itertools
from typing import Generic, TypeVar

Request = TypeVar("Request")


class SimulatedReplica(Generic[Request]):
    """Requests are measured in work: 1 is an average request. While the replica has k of them, each progresses by 1 / seconds(k).

    All progress equally, so a request is finished when the work done since its start is its own. The work done is one number for
    the whole replica, and a change of speed costs nothing for each request.
    """

    def __init__(self, *, base_s: float, per_request_s: float, slowdown: float) -> None:
        self._base_s = base_s
        self._per_request_s = per_request_s
        self._slowdown = slowdown
        self._is_training = False
        self._now = 0.0
        self._work_done = 0.0
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, Request]] = []
        self.idle_s = 0.0
        self.max_load = 0
        self.load_s = 0.0
        """Sum of load times seconds."""

    @property
    def load(self) -> int:
        return len(self._running)

    @property
    def _request_s(self) -> float:
        seconds = self._base_s + self._per_request_s * len(self._running)
        return max(1e-9, seconds * (1.0 + self._slowdown if self._is_training else 1.0))

    @property
    def next_end(self) -> float | None:
        """When the next request is finished, if nothing changes before."""
        if not self._running:
            return None
        return self._now + max(0.0, self._running[0][0] - self._work_done) * self._request_s

    def advance(self, now: float) -> None:
        elapsed = now - self._now
        if self._running:
            self._work_done += elapsed / self._request_s
            self.load_s += elapsed * len(self._running)
        else:
            self.idle_s += elapsed
        self._now = now

    def add(self, request: Request, work: float, now: float) -> None:
        self.advance(now)
        heapq.heappush(self._running, (self._work_done + work, next(self._numbers), request))
        self.max_load = max(self.max_load, len(self._running))

    def pop(self, now: float) -> Request:
        """The request that is finished first."""
        self.advance(now)
        self._work_done = max(self._work_done, self._running[0][0])
        return heapq.heappop(self._running)[2]

    def set_training(self, is_training: bool, now: float) -> None:
        self.advance(now)
        self._is_training = is_training
