"""A simulated replica: its requests progress at equal speed, which depends on how many there are."""

import heapq
import itertools
import math
from typing import Generic, TypeVar

Request = TypeVar("Request")


class SlowedClock:
    """Passes more slowly than the simulated time: what takes a second by this clock takes `slowness` simulated seconds."""

    __slots__ = ("_at", "_slowness", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._at = 0.0
        self._slowness = 1.0

    def advance(self, at: float) -> None:
        """`at` is the simulated time."""
        self.now += (at - self._at) / self._slowness
        self._at = at

    def set_slowness(self, slowness: float, at: float) -> None:
        self.advance(at)
        self._slowness = slowness

    def simulated_time_of(self, moment: float) -> float:
        """Simulated time at which the clock reaches `moment`, if nothing changes before."""
        return self._at + max(0.0, moment - self.now) * self._slowness


class SimulatedReplica(Generic[Request]):
    """Requests are measured in work: 1 is an average request. While the replica has k of them, each progresses by 1 / seconds(k).

    All progress equally, so a request is finished when the work done since its start is its own. The work done is one number for
    the whole replica, and a change of speed costs nothing for each request. Times are those of the clock of all replicas, which
    is slowed by what they share.
    """

    __slots__ = (
        "_base_s",
        "_now",
        "_numbers",
        "_per_request_s",
        "_request_s",
        "_running",
        "_work_done",
        "max_load",
        "next_end",
        "rate",
    )

    def __init__(self, *, base_s: float, per_request_s: float) -> None:
        self._base_s = base_s
        self._per_request_s = per_request_s
        self._now = 0.0
        self._work_done = 0.0
        self._request_s = 1.0
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, Request]] = []
        self.max_load = 0
        self.next_end = math.inf
        """When the next request is finished, if nothing changes before."""
        self.rate = 0.0
        """Average requests finished per second."""

    def add(self, request: Request, work: float, now: float) -> None:
        self._advance(now)
        heapq.heappush(self._running, (self._work_done + work, next(self._numbers), request))
        self.max_load = max(self.max_load, len(self._running))
        self._change_speed()

    def pop(self, now: float) -> Request:
        """The request that is finished first."""
        self._advance(now)
        work, _, request = heapq.heappop(self._running)
        self._work_done = max(self._work_done, work)
        self._change_speed()
        return request

    def _advance(self, now: float) -> None:
        if self._running:
            self._work_done += (now - self._now) / self._request_s
        self._now = now

    def _change_speed(self) -> None:
        running = self._running
        if not running:
            self.next_end, self.rate = math.inf, 0.0
            return
        # A request takes some time even if the traces contain none that did.
        self._request_s = max(1e-9, self._base_s + self._per_request_s * len(running))
        self.next_end = self._now + max(0.0, running[0][0] - self._work_done) * self._request_s
        self.rate = len(running) / self._request_s
