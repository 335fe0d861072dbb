"""A simulated replica: its requests progress at equal speed, which depends on how many there are."""

import heapq
import itertools
import math
from typing import Generic, TypeVar

Request = TypeVar("Request")


class SimulatedReplica(Generic[Request]):
    """Requests are measured in work: 1 is an average request. While the replica has k of them, each progresses by 1 / seconds(k).

    All progress equally, so a request is finished when the work done since its start is its own. The work done is one number for
    the whole replica, and a change of speed costs nothing for each request.
    """

    __slots__ = (
        "_base_s",
        "_now",
        "_numbers",
        "_per_request_s",
        "_request_s",
        "_running",
        "_slowdown",
        "_slowness",
        "_work_done",
        "idle_s",
        "max_load",
        "next_end",
    )

    def __init__(self, *, base_s: float, per_request_s: float, slowdown: float) -> None:
        self._base_s = base_s
        self._per_request_s = per_request_s
        self._slowdown = slowdown
        self._slowness = 1.0
        self._now = 0.0
        self._work_done = 0.0
        self._request_s = 1.0
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, Request]] = []
        self.idle_s = 0.0
        self.max_load = 0
        self.next_end = math.inf
        """When the next request is finished, if nothing changes before."""

    def advance(self, now: float) -> None:
        if self._running:
            self._work_done += (now - self._now) / self._request_s
        else:
            self.idle_s += now - self._now
        self._now = now

    def add(self, request: Request, work: float, now: float) -> None:
        self.advance(now)
        heapq.heappush(self._running, (self._work_done + work, next(self._numbers), request))
        self.max_load = max(self.max_load, len(self._running))
        self._change_speed()

    def pop(self, now: float) -> Request:
        """The request that is finished first."""
        self.advance(now)
        work, _, request = heapq.heappop(self._running)
        self._work_done = max(self._work_done, work)
        self._change_speed()
        return request

    def set_training(self, is_training: bool, now: float) -> None:
        self.advance(now)
        self._slowness = 1.0 + (self._slowdown if is_training else 0.0)
        self._change_speed()

    def _change_speed(self) -> None:
        running = self._running
        if not running:
            self.next_end = math.inf
            return
        # A request takes some time even if the traces contain none that did.
        self._request_s = max(1e-9, (self._base_s + self._per_request_s * len(running)) * self._slowness)
        self.next_end = self._now + max(0.0, running[0][0] - self._work_done) * self._request_s
